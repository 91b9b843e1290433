"""How endpoints that generate reply, once they know what was asked."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from sapwood.server.connection import EventStream, id_headers
from sapwood.server.outputs import OpenAIAnswer
from sapwood.server.serving import Serving, Work


async def openai_reply(
    serving: Serving, request: Request, answer: OpenAIAnswer, work: Work, *, stream: bool
) -> Response:
    """The answer to every prompt, streamed or whole. Raises ApiError, SapwoodError, ClientLeft."""
    if stream:
        return event_stream(serving, _events(serving, answer, work), answer.id)
    outputs = await serving.answer(request, work)
    return json_reply(answer.whole(outputs), answer.id)


async def _events(
    serving: Serving, answer: OpenAIAnswer, work: Work
) -> AsyncGenerator[bytes, None]:
    async with aclosing(serving.stream(work)) as pieces:
        async for index, output in pieces:
            yield answer.pieces(index, output)
    yield answer.end()


def json_reply(content: Any, request_id: str) -> Response:
    return Response(to_json(content), headers=id_headers(request_id), media_type="application/json")


def event_stream(
    serving: Serving, events: AsyncGenerator[bytes, None], request_id: str
) -> Response:
    return EventStream(events, headers=id_headers(request_id), ping_seconds=serving.ping_seconds)
