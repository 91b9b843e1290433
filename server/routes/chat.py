"""OpenAI's chat: `POST /v1/chat/completions`."""

from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sapwood.server.body import request_body
from sapwood.server.outputs import ChatAnswer
from sapwood.server.routes.replies import openai_reply
from sapwood.server.schemas_openai import ChatRequest
from sapwood.server.serving import ServingDep, Work

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/chat/completions", summary="Answer a conversation", openapi_extra=request_body(ChatRequest)
)
async def chat_completions(request: Request, serving: ServingDep) -> Response:
    body = await serving.read(request, ChatRequest)
    sampling = body.sampling()
    answer = ChatAnswer(
        id=f"chatcmpl-{body.request_id or uuid4().hex}",
        model=serving.model_name(body.model),
        fingerprint=serving.fingerprint,
        tokenizer=serving.engine.tokenizer,
        num_answers=sampling.n,
        include_usage=body.include_usage,
    )
    work = Work(
        prompts=[[message.plain() for message in body.messages]],
        sampling=[sampling],
        request_ids=[answer.id],
    )
    return await openai_reply(serving, request, answer, work, stream=bool(body.stream))
