"""How anything that goes wrong is told to a client: one envelope, `{"error": {...}}`.

    {"error": {"message": str, "type": str, "param": str | None, "code": str | None}}

`ApiError` is an answer with that envelope; `as_api_error` turns every other error into one. What
clients do with it is their own affair: the OpenAI libraries retry 409, 429 and 5xx, so only what
may pass by itself gets such a status.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sapwood.runtime.errors import (
    EngineBusyError,
    EngineClosedError,
    ModelError,
    RequestError,
    SapwoodError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 2000  # characters; messages may quote what a client sent
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; it only shows in logs
RETRY_SECONDS = 5

# What people look for under paths that are not served.
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "/v1/responses": "send the conversation to /v1/chat/completions",
        "/v1/messages": "send the conversation to /v1/chat/completions",
        "/v1/embeddings": "the models served here generate text, they do not embed it",
        "/chat/completions": "the base URL ends in /v1",
        "/completions": "the base URL ends in /v1",
    }
)


class ClientLeft(Exception):
    """The connection was closed before the answer was done. There is nobody to tell."""


class ApiError(Exception):
    """An answer that is an error: status, envelope and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> dict[str, Any]:
        message = self.message
        if len(message) > MAX_MESSAGE_LENGTH:
            message = message[:MAX_MESSAGE_LENGTH] + "..."
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return Response(
            to_json(self.envelope),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def error_responses() -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of errors, the same for every endpoint."""
    text = {"type": ["string", "null"]}
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": text,
        "code": text,
    }
    error = {"type": "object", "properties": fields, "required": list(fields)}
    envelope = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    content = {"application/json": {"schema": envelope}}
    return {
        "4XX": {"description": "The request cannot be answered", "content": content},
        "5XX": {"description": "The server cannot answer it", "content": content},
    }


def unavailable(message: str) -> ApiError:
    """503: not now, but perhaps in a moment."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        kind="server_error",
        code="unavailable",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def as_api_error(error: Exception, *, path: str = "") -> ApiError:
    """The answer to `error`. What is none of our own kinds is told as an internal error."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case EngineBusyError() | EngineClosedError() | ModelError():
            return unavailable(str(error))
        case SapwoodError():
            return ApiError(500, str(error), kind="server_error", code="engine_error")
        case RequestValidationError():
            first = error.errors()[0]
            return ApiError(400, str(first["msg"]), param=str(first["loc"][-1]))
        case HTTPException():
            return _from_http(error, path)
        case _:
            return ApiError(
                500,
                f"internal error ({type(error).__name__}); the server's log has the details",
                kind="server_error",
                code="internal_error",
            )


def _from_http(error: HTTPException, path: str) -> ApiError:
    """The framework's own refusals: no such path, no such method."""
    message, code = str(error.detail), None
    if error.status_code == HTTPStatus.NOT_FOUND:
        hint = _HINTS.get(path.rstrip("/"), "GET /openapi.json lists what there is")
        message, code = f"there is no {path} here: {hint}", "not_found"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another")
        message, code = f"this method is not allowed on {path}: use {allowed}", "method_not_allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """The exception handler of the whole application."""
    if isinstance(error, (ClientLeft, ClientDisconnect)):
        logger.info("a client left %s", request.url.path)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return as_api_error(error, path=request.url.path).response()
