"""The native endpoint, `POST /generate`: SGLang's request and response."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sapwood.server.body import request_body
from sapwood.server.outputs import DONE, NativeAnswer, sse
from sapwood.server.routes.replies import event_stream, json_reply
from sapwood.server.schemas_native import GenerateRequest
from sapwood.server.serving import Serving, ServingDep, Work

router = APIRouter(tags=["native"])


@router.post("/generate", summary="Continue prompts", openapi_extra=request_body(GenerateRequest))
async def generate(request: Request, serving: ServingDep) -> Response:
    body = await serving.read(request, GenerateRequest)
    prompts, single = body.prompts(serving.engine.info)
    work = Work(
        prompts=prompts,
        sampling=body.sampling(len(prompts)),
        request_ids=body.request_ids(len(prompts)),
        names=body.names,
    )
    request_id = work.request_ids[0]
    answers = [
        NativeAnswer(
            tokenizer=serving.engine.tokenizer,
            with_text=bool(body.return_text_in_logprobs),
            index=None if single or not body.stream else i,
        )
        for i in range(len(prompts))
    ]
    if body.stream:
        return event_stream(serving, _events(serving, answers, work), request_id)
    outputs = await serving.answer(request, work)
    results = [answer.add(output) for answer, output in zip(answers, outputs, strict=True)]
    return json_reply(results[0] if single else results, request_id)


async def _events(
    serving: Serving, answers: list[NativeAnswer], work: Work
) -> AsyncGenerator[bytes, None]:
    async with aclosing(serving.stream(work)) as pieces:
        async for index, output in pieces:
            yield sse(answers[index].add(output))
    yield DONE
