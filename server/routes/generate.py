"""The native endpoint, `POST /generate`: SGLang's request and response."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sapwood.runtime.reasoning_block import ReasoningTags
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.separated_reasoning import SeparatedReasoning, tags_of_type
from sapwood.server.body import request_body
from sapwood.server.engine import Prompt, ServingTokenizer
from sapwood.server.outputs import DONE, NativeAnswer, sse
from sapwood.server.outputs_sapwood import SapwoodAnswer
from sapwood.server.routes.replies import event_stream, json_reply
from sapwood.server.schemas import in_callers_words
from sapwood.server.schemas_native import GenerateRequest
from sapwood.server.schemas_sapwood import Asked
from sapwood.server.serving import Serving, ServingDep, Work

router = APIRouter(tags=["native"])

MAX_END_TOKENS = 64  # of a prompt: more than a tag and white space


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
                sapwood=_asked_answer(serving, prompt, params, of_prompt),
            )
            for _ in range(params.n)
        ]
        for prompt, params, start, of_prompt in zip(prompts, sampling, starts, asked, strict=True)
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


def _asked_answer(
    serving: Serving, prompt: Prompt, sampling: SamplingParams, asked: Asked
) -> SapwoodAnswer | None:
    """What the answer has beside SGLang's fields. Raises ApiError."""
    if not asked.text_ids and not asked.separate_reasoning:
        return None
    tokenizer = serving.engine.tokenizer
    tags = _asked_tags(serving, asked) if asked.separate_reasoning else None
    reasoning = None
    if tags is not None:
        reasoning = SeparatedReasoning(tags, _end_of(prompt, tokenizer), sampling, tokenizer)
    return SapwoodAnswer(
        tokenizer=tokenizer,
        sampling=sampling,
        with_text_ids=asked.text_ids,
        with_reasoning=bool(asked.separate_reasoning),
        reasoning=reasoning,
    )


def _asked_tags(serving: Serving, asked: Asked) -> ReasoningTags | None:
    """How reasoning is marked, None for a model that writes none. Raises ApiError."""
    name = asked.separate_reasoning if isinstance(asked.separate_reasoning, str) else None
    with in_callers_words({"model_type": f"{asked.at}.separate_reasoning"}):
        return tags_of_type(name, serving.engine.info.reasoning_tags)


def _end_of(prompt: Prompt, tokenizer: ServingTokenizer) -> str:
    """The text of a prompt's last tokens, special ones included."""
    if isinstance(prompt, str):
        return prompt
    ids = prompt[-MAX_END_TOKENS:]
    return b"".join(map(tokenizer.token_raw_bytes, ids)).decode(errors="replace")


async def _events(
    serving: Serving, answers: list[list[NativeAnswer]], work: Work
) -> AsyncGenerator[bytes, None]:
    async with aclosing(serving.stream(work)) as pieces:
        async for index, output in pieces:
            [piece] = output.outputs
            yield sse(answers[index][piece.index].add(output, piece))
    yield DONE
