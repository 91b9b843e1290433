"""The application: a value that a function builds. Nothing in this package is global."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from uuid import uuid4

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import sapwood
from sapwood.runtime.errors import SapwoodError
from sapwood.server.connection import id_headers
from sapwood.server.engine import ServingEngine
from sapwood.server.errors import ApiError, ClientLeft, answer_error, as_api_error, error_responses
from sapwood.server.routes import ROUTES
from sapwood.server.serving import Serving

logger = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 32 * 2**20
PING_SECONDS = 5.0


def create_app(
    engine: ServingEngine | None = None,
    *,
    load: Callable[[], ServingEngine] | None = None,
    served_model_names: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    ping_seconds: float = PING_SECONDS,
) -> FastAPI:
    """An ASGI application over one engine.

    Give either a running `engine`, which stays the caller's to close, or a function `load` that
    makes one: it is called on a thread when the application starts, `/ready` says 503 until it has
    returned, and the application closes the engine when it ends.

    `served_model_names` are the names that requests may ask for, by default the engine's own.
    Streams that have nothing to say for `ping_seconds` send a comment.
    """
    if (engine is None) == (load is None):
        raise TypeError("create_app takes either an engine or a function that loads one")
    serving = Serving(
        engine=engine,
        load=load,
        served_model_names=served_model_names,
        max_body_bytes=max_body_bytes,
        ping_seconds=ping_seconds,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        serving.start()
        try:
            yield
        finally:
            await asyncio.to_thread(serving.close)

    app = FastAPI(
        title="Sapwood",
        version=sapwood.__version__,
        lifespan=lifespan,
        responses=error_responses(),
    )
    app.state.serving = serving
    for path in ROUTES.values():
        module, _, name = path.partition(":")
        app.include_router(getattr(import_module(module), name))
    for kind in (
        ApiError,
        SapwoodError,
        ClientLeft,
        ClientDisconnect,
        HTTPException,
        RequestValidationError,
    ):
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(LastResort)
    return app


class LastResort:
    """Gives every answer an `x-request-id`, and an answer to every error that nobody expected.

    The id is the one that the client sent, if it is sound, else that of the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = id_headers(Headers(scope=scope).get("x-request-id", ""))
        own = id_headers(f"req_{uuid4().hex}")
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                if sent or "x-request-id" not in headers:
                    headers.update(sent or own)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("a request to %s failed", scope["path"])
            if has_started:
                raise  # the server cuts the connection; there is no other way left to tell
            await as_api_error(error).response()(scope, receive, send_with_id)
