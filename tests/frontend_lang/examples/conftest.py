"""One engine and one server for all examples, with the real model."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sapwood import Engine, RuntimeEndpoint


@pytest.fixture(scope="package")
def engine(real_model: str) -> Iterator["Engine"]:
    from sapwood import Engine

    with Engine(real_model, max_model_len=2048, num_kv_blocks=1024) as engine:
        yield engine


@pytest.fixture(scope="package")
def server_url(engine: "Engine") -> Iterator[str]:
    """A server over that engine in this process, on a free port."""
    import uvicorn

    from sapwood import AsyncEngine
    from sapwood.server.app import create_app

    app = create_app(AsyncEngine.over(engine))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="package")
def endpoint(server_url: str) -> Iterator["RuntimeEndpoint"]:
    """The server as a backend."""
    from sapwood import RuntimeEndpoint

    with closing(RuntimeEndpoint(server_url)) as endpoint:
        yield endpoint
