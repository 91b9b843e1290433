"""A request's body: bytes that are counted as they come, JSON, and then a checked value.

Refused with 413 or 400 and a reason, before anything else sees them: bodies over the limit, what is
not JSON in valid UTF-8, NaN and infinities, lone surrogates, numbers of thousands of digits, deep
nesting (over 200 levels), and values that the schema does not know.
"""

import asyncio
import difflib
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from sapwood.server.errors import ApiError

# Parsing holds the interpreter: 1 ms for 256 kB of text, and it costs most per array or object.
LARGE_BODY_BYTES = 256 * 1024
MAX_BRACKETS = 500_000

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model], *, max_bytes: int) -> Model:
    """The body of `request` as a `model`. Raises ApiError.

    The content type is not looked at: JSON is the only thing that can be meant. A large body is
    parsed in a thread.
    """
    body = await read_limited(request, max_bytes)
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(parse, body, model)
    return parse(body, model)


async def read_limited(request: Request, max_bytes: int) -> bytes:
    """All of the body, unless it grows over `max_bytes`. Holds at most one chunk more than that."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def parse(body: bytes, model: type[Model]) -> Model:
    """Check `body` against `model`. Raises ApiError. O(len(body))."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise ApiError(400, f"the body has over {MAX_BRACKETS} brackets; send several requests")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return checked(value, model)


def checked(value: Any, model: type[Model], *, at: tuple[str | int, ...] = ()) -> Model:
    """`value` as a `model`; `at` is its place in the body. Raises ApiError for the first fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _as_api_error(first, at, model) from error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is larger than {max_bytes} bytes; send less or raise --max-body-mb",
        code="request_too_large",
        # What the client still sends is not read, so the connection cannot be used again.
        headers={"Connection": "close"},
    )


def _as_api_error(
    detail: ErrorDetails, at: tuple[str | int, ...], model: type[BaseModel]
) -> ApiError:
    path = json_path((*at, *detail["loc"]))
    match detail["type"]:
        case "extra_forbidden":
            message = f"unknown field {path}{_near_matches(detail['loc'], model)}"
            return ApiError(400, message, param=path, code="unknown_parameter")
        case "missing":
            message = f"{path} is missing"
            return ApiError(400, message, param=path, code="missing_required_parameter")
        case "unsupported":
            return ApiError(
                400, f"{path}: {detail['msg']}", param=path, code="unsupported_parameter"
            )
    return ApiError(400, f"{path}: {detail['msg']}" if path else detail["msg"], param=path or None)


def json_path(location: Sequence[str | int]) -> str:
    """A place in a JSON value, as a person writes it: `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


class Refused(AfterValidator):
    """The mark of a field that is known and not served: nobody is pointed to it."""


def _near_matches(location: Sequence[str | int], model: type[BaseModel]) -> str:
    """Fields of `model` whose names are close to an unknown one."""
    if len(location) != 1:
        return ""
    served = [
        name
        for name, field in model.model_fields.items()
        if not any(isinstance(note, Refused) for note in field.metadata)
    ]
    near = difflib.get_close_matches(str(location[0])[:64], served)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of an endpoint that takes `model`: schemas of parts are put in place."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def in_place(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return in_place(definitions[node["$ref"].rpartition("/")[2]])
            return {key: in_place(value) for key, value in node.items()}
        return [in_place(value) for value in node] if isinstance(node, list) else node

    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": in_place(schema)}},
        }
    }
