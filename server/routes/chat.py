"""OpenAI's chat: `POST /v1/chat/completions`, and why a conversation is not continued."""

from dataclasses import asdict
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sapwood.server.body import request_body
from sapwood.server.outputs import ChatAnswer
from sapwood.server.routes.replies import json_reply, openai_reply
from sapwood.server.schemas_openai import ChatRequest
from sapwood.server.serving import ServingDep, Work

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/chat/completions", summary="Answer a conversation", openapi_extra=request_body(ChatRequest)
)
async def chat_completions(request: Request, serving: ServingDep) -> Response:
    body = await serving.read(request, ChatRequest)
    sampling = body.sampling()
    chat = body.chat()
    answer = ChatAnswer(
        id=f"chatcmpl-{body.request_id or uuid4().hex}",
        model=serving.model_name(body.model),
        fingerprint=serving.fingerprint,
        tokenizer=serving.engine.tokenizer,
        num_answers=sampling.n,
        include_usage=body.include_usage,
        may_call=bool(chat.options.tools),
        names_tool=chat.options.choice.name is not None,
    )
    work = Work(
        prompts=[chat],
        sampling=[sampling],
        request_ids=[answer.id],
        names=body.names,
        hints=body.hints(),
    )
    return await openai_reply(serving, request, answer, work, stream=bool(body.stream))


@router.post(
    "/v1/chat/completions/explain",
    summary="Say how much of a conversation continues its last turn",
    openapi_extra=request_body(ChatRequest),
)
async def explain_prefix(request: Request, serving: ServingDep) -> Response:
    """Takes the body of a chat request and runs nothing.

    `num_remembered_tokens` of the prompt's `num_tokens` are those of an earlier turn.
    `divergence` says where and why it leaves the conversation's last turn, null if it does not.
    """
    body = await serving.read(request, ChatRequest)
    serving.model_name(body.model)
    report = await serving.engine.explain_prefix(body.chat())
    return json_reply(asdict(report), body.request_id or f"explain-{uuid4().hex}")
