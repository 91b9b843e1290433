"""OpenAI's older completions: `POST /v1/completions`, text or token ids, one prompt or many."""

from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sapwood.server.body import request_body
from sapwood.server.engine import Prompt, TokenTexts
from sapwood.server.outputs import TextAnswer
from sapwood.server.routes.replies import openai_reply
from sapwood.server.schemas import as_prompts
from sapwood.server.schemas_openai import CompletionRequest
from sapwood.server.serving import ServingDep, Work

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/completions",
    summary="Continue text or token ids",
    openapi_extra=request_body(CompletionRequest),
)
async def completions(request: Request, serving: ServingDep) -> Response:
    body = await serving.read(request, CompletionRequest)
    engine = serving.engine
    sampling = body.sampling()
    prompts, single = as_prompts(body.prompt, "prompt", engine.info)
    answer = TextAnswer(
        id=f"cmpl-{body.request_id or uuid4().hex}",
        model=serving.model_name(body.model),
        fingerprint=serving.fingerprint,
        tokenizer=engine.tokenizer,
        num_answers=sampling.n,
        include_usage=body.include_usage,
        echo=[_text(prompt, engine.tokenizer) for prompt in prompts] if body.echo else (),
    )
    work = Work(
        prompts=prompts,
        sampling=[sampling] * len(prompts),
        request_ids=[answer.id if single else f"{answer.id}-{i}" for i in range(len(prompts))],
        names=body.names,
        hints=body.hints(),
    )
    return await openai_reply(serving, request, answer, work, stream=bool(body.stream))


def _text(prompt: Prompt, tokenizer: TokenTexts) -> str:
    """What a prompt reads like when it is echoed. A token id that is not one adds nothing."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(tokenizer.token_raw_bytes(id) for id in prompt).decode(errors="replace")
