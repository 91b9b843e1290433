"""The native endpoint, `POST /generate`: SGLang's request and response."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from sapwood.server.body import request_body
from sapwood.server.outputs import DONE, NativeAnswer, sse
from sapwood.server.schemas_native import GenerateRequest
from sapwood.server.serving import Serving, ServingDep, Work

router = APIRouter(tags=["native"])


@router.post("/generate", summary="Continue prompts", openapi_extra=request_body(GenerateRequest))
async def generate(request: Request, serving: ServingDep) -> Response:
    body = await serving.read(request, GenerateRequest)
    prompts, single = body.prompts(serving.engine.info.vocab_size)
    work = Work(
        prompts=prompts,
        sampling=body.sampling(len(prompts)),
        request_ids=body.request_ids(len(prompts)),
        names=body.names,
    )
    answers = [
        NativeAnswer(
            tokenizer=serving.engine.tokenizer,
            with_text=bool(body.return_text_in_logprobs),
            index=None if single or not body.stream else i,
        )
        for i in range(len(prompts))
    ]
    if body.stream:
        return serving.events(_events(serving, answers, work))
    outputs = await serving.answer(request, work)
    results = [answer.add(output) for answer, output in zip(answers, outputs, strict=True)]
    return Response(to_json(results[0] if single else results), media_type="application/json")


async def _events(
    serving: Serving, answers: list[NativeAnswer], work: Work
) -> AsyncGenerator[bytes, None]:
    async with aclosing(serving.stream(work)) as pieces:
        async for index, output in pieces:
            yield sse(answers[index].add(output))
    yield DONE
