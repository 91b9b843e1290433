import threading
import time

import httpx
import pytest

from sapwood.runtime.errors import ModelNotFoundError
from sapwood.server.app import create_app
from tests.server.fakes import FakeEngine
from tests.server.helpers import chat, error

pytestmark = pytest.mark.anyio


async def test_a_loaded_engine_is_alive_and_ready(client):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready", "model": "fake/model"}


async def test_a_dead_engine_is_neither(client, engine):
    engine.is_alive = False
    error(await client.get("/health"), 503)
    error(await client.get("/ready"), 503)


async def test_the_version_is_the_packages(client):
    import sapwood

    assert (await client.get("/version")).json() == {"version": sapwood.__version__}


async def test_models_are_listed_with_their_context(connect, engine):
    client = connect(engine, served_model_names=["org/name", "alias"])
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/name", "alias"]
    model = (await client.get("/v1/models/org/name")).json()
    assert model == listed["data"][0]
    assert (model["object"], model["max_model_len"]) == ("model", 4096)
    assert isinstance(model["created"], int)


async def test_flush_cache_reaches_the_engine(client, engine):
    assert (await client.post("/flush_cache")).status_code == 200
    assert engine.num_flushes == 1


async def test_the_api_describes_itself(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "messages" in schema["schema"]["properties"]
    assert "$ref" not in str(schema)
    for operations in paths.values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert {"4XX", "5XX"} <= set(operation["responses"])


def test_an_application_answers_while_its_model_is_being_loaded(listen):
    loaded, engine = threading.Event(), FakeEngine()

    def load() -> FakeEngine:
        loaded.wait()
        return engine

    with httpx.Client(base_url=listen(load=load)) as client:
        assert client.get("/health").status_code == 200
        assert error(client.get("/ready"), 503)["message"].startswith("the model is being loaded")
        response = client.post("/v1/chat/completions", json=chat())
        error(response, 503)
        assert response.headers["retry-after"]
        assert client.get("/metrics").status_code == 200
        loaded.set()
        while client.get("/ready").status_code != 200:
            time.sleep(0.005)
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    assert not engine.closed


def test_a_model_that_cannot_be_loaded_is_told(listen):
    def load() -> FakeEngine:
        raise ModelNotFoundError("nothing by the name of x")

    with httpx.Client(base_url=listen(load=load)) as client:
        while client.get("/health").status_code == 200:
            time.sleep(0.005)
        assert "nothing by the name of x" in error(client.get("/ready"), 503)["message"]


async def test_an_engine_that_the_application_loaded_is_closed_with_it():
    engine = FakeEngine()
    app = create_app(load=lambda: engine)
    async with app.router.lifespan_context(app):
        while app.state.serving.model_names != ("fake/model",):
            time.sleep(0.001)
    assert engine.closed


async def test_an_engine_that_was_given_is_left_running(engine):
    app = create_app(engine)
    async with app.router.lifespan_context(app):
        pass
    assert not engine.closed


def test_an_application_needs_one_source_of_an_engine():
    with pytest.raises(TypeError):
        create_app()
    with pytest.raises(TypeError):
        create_app(FakeEngine(), load=FakeEngine)
