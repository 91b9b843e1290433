from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import FakeEngine
from tests.server.helpers import chat

pytestmark = pytest.mark.anyio


async def scrape(client) -> dict[str, float]:
    """Values by sample name; those of one name are added up."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


async def test_counters_are_those_of_the_engine(client):
    for _ in range(2):
        await client.post("/v1/chat/completions", json=chat(max_tokens=3))
    values = await scrape(client)
    assert values["sapwood:prompt_tokens_total"] == 16
    assert values["sapwood:cached_tokens_total"] == 7
    assert values["sapwood:generation_tokens_total"] == 6
    assert values["sapwood:request_success_total"] == 2
    assert values["sapwood:num_requests_running"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_each_finished_request_is_timed_once(client, stream):
    await client.post("/v1/chat/completions", json=chat(max_tokens=3, stream=stream))
    request = {"text": ["a", "b"], "stream": stream, "sampling_params": {"max_new_tokens": 1}}
    await client.post("/generate", json=request)
    values = await scrape(client)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert values[f"sapwood:{name}_seconds_count"] == 3
    assert values["sapwood:inter_token_latency_seconds_count"] == 1


async def test_compiled_constraints_are_counted(client, engine, monkeypatch):
    told = replace(engine.constraint_stats(), num_hits=3, compile_seconds=0.5, num_waiting=7)
    monkeypatch.setattr(engine, "constraint_stats", lambda: told)
    values = await scrape(client)
    assert values["sapwood:constraint_cache_hits_total"] == 3
    assert values["sapwood:constraint_compile_seconds_total"] == 0.5
    assert values["sapwood:num_constraints_waiting"] == 7


async def test_applications_do_not_share_their_numbers(connect):
    first, second = connect(FakeEngine()), connect(FakeEngine())
    await first.post("/v1/chat/completions", json=chat())
    values = await scrape(second)
    assert values.get("sapwood:time_to_first_token_seconds_count", 0) == 0
    assert values["sapwood:prompt_tokens_total"] == 0
