"""The native endpoint, `POST /generate`: SGLang's request and response."""

import itertools
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
    prompts, is_single = body.prompts(serving.engine.info)
    asked = body.asked_of_sapwood(len(prompts))
    sampling = body.sampling(asked)
    work = Work(
        prompts=prompts,
        sampling=sampling,
        request_ids=body.request_ids(len(prompts)),
        names=body.names,
        hints=[of_prompt.hints for of_prompt in asked],
    )
    request_id = work.request_ids[0]
    starts = body.logprob_starts(len(prompts))
    is_single = is_single and sampling[0].n == 1
    indices = itertools.count()
    answers = [
        [
            NativeAnswer(
                tokenizer=serving.engine.tokenizer,
                with_text=bool(body.return_text_in_logprobs),
                index=None if is_single or not body.stream else next(indices),
                input_start=max(0, start),
                text_ids_for=params if of_prompt.text_ids else None,
            )
            for _ in range(params.n)
        ]
        for params, start, of_prompt in zip(sampling, starts, asked, strict=True)
    ]
    if body.stream:
        return event_stream(serving, _events(serving, answers, work), request_id)
    outputs = await serving.answer(request, work)
    results = [
        answer.add(output, piece)
        for of_prompt, output in zip(answers, outputs, strict=True)
        for answer, piece in zip(of_prompt, output.outputs, strict=True)
    ]
    return json_reply(results[0] if is_single else results, request_id)


async def _events(
    serving: Serving, answers: list[list[NativeAnswer]], work: Work
) -> AsyncGenerator[bytes, None]:
    async with aclosing(serving.stream(work)) as pieces:
        async for index, output in pieces:
            [piece] = output.outputs
            yield sse(answers[index][piece.index].add(output, piece))
    yield DONE
