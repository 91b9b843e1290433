"""One engine and one server for all examples, with the real model."""

import threading
import time
from collections.abc import Iterator

import pytest

OPTIONS = {"max_model_len": 2048, "num_kv_blocks": 1024}


@pytest.fixture(scope="package")
def engine(real_model: str) -> Iterator[object]:
    from sapwood import Engine

    with Engine(real_model, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="package")
def server_url(real_model: str) -> Iterator[str]:
    """A server in this process, on a free port."""
    import uvicorn

    from sapwood import AsyncEngine
    from sapwood.server.app import create_app

    served = AsyncEngine(real_model, **OPTIONS)
    server = uvicorn.Server(uvicorn.Config(create_app(served), port=0, log_level="warning"))
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
        served.close()
