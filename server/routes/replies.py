"""How both OpenAI endpoints reply, once they know what was asked."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from sapwood.server.outputs import OpenAIAnswer
from sapwood.server.serving import Serving, Work


async def openai_reply(
    serving: Serving, request: Request, answer: OpenAIAnswer, work: Work, *, stream: bool
) -> Response:
    """The answer to every prompt, streamed or whole. Raises ApiError, SapwoodError, ClientLeft."""
    if stream:
        return serving.events(_events(serving, answer, work))
    outputs = await serving.answer(request, work)
    return Response(to_json(answer.whole(outputs)), media_type="application/json")


async def _events(
    serving: Serving, answer: OpenAIAnswer, work: Work
) -> AsyncGenerator[bytes, None]:
    async with aclosing(serving.stream(work)) as pieces:
        async for index, output in pieces:
            yield answer.pieces(index, output)
    yield answer.end()
