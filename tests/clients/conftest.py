"""Servers for the drivers: a fake engine, the real model, or one that is running elsewhere.

With `SAPWOOD_BASE_URL=http://127.0.0.1:8000` the drivers use a server that is running; then
`pytest --confcutdir=tests/clients tests/clients` needs nothing but pytest and the client library.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# It looks into an engine of its own.
collect_ignore = ["test_outlines.py"] if "SAPWOOD_BASE_URL" in os.environ else []


@contextmanager
def listening(app: Any) -> Iterator[str]:
    import uvicorn

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


@pytest.fixture(
    scope="session",
    params=["fake"]
    if "SAPWOOD_BASE_URL" in os.environ
    else ["fake", pytest.param("real", marks=pytest.mark.real_model)],
)
def base_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if url := os.environ.get("SAPWOOD_BASE_URL"):
        yield url
        return
    from sapwood.server.app import create_app

    if request.param == "fake":
        from tests.server.fakes import FakeEngine, call

        must_call = call("get_weather", '{"city": "Bern", "unit": "celsius"}')
        fake = FakeEngine(max_model_len=2048, must_call=must_call)
        with listening(create_app(fake)) as url:
            yield url
        return
    from sapwood import AsyncEngine

    model = request.getfixturevalue("real_model")
    # In int8 its greedy answer to the drivers' question, close to a tie at one word, has no end.
    engine = AsyncEngine(model, max_model_len=2048, num_kv_blocks=512, quantize="none")
    try:
        with listening(create_app(engine)) as url:
            yield url
    finally:
        engine.close()
