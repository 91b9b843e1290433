"""Applications over a fake engine: with a client in process, and behind a real socket."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from sapwood.server.app import create_app
from tests.server.fakes import FakeEngine

Connect = Callable[..., httpx.AsyncClient]
Listen = Callable[..., str]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def connect() -> Connect:
    """A client of an application with the given options, without a socket."""

    def make(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=create_app(engine, **options))
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    return make


@pytest.fixture
def client(connect: Connect, engine: FakeEngine) -> httpx.AsyncClient:
    return connect(engine)


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Serves an application on a free port of this machine; its URL."""
    running = []

    def make(engine: FakeEngine | None = None, **options: Any) -> str:
        app = create_app(engine, **options)
        config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    yield make
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join()
