"""Every sampling option through the endpoints, on a real engine with a tiny random model."""

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood import AsyncEngine
from sapwood.server.app import create_app
from tests.server.helpers import error, events

PROMPT = "The quick brown fox jumps over"
MESSAGES = [{"role": "user", "content": PROMPT}]
# An endpoint's path, and how it is asked for PROMPT.
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": MESSAGES},
}
Post = Callable[..., httpx.Response]


class Server:
    """An application over a tiny engine, on an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.engine = AsyncEngine(
            str(folder), num_kv_blocks=256, max_num_seqs=16, check_invariants=True
        )
        transport = httpx.ASGITransport(app=create_app(self.engine))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        self.runner = asyncio.Runner()

    def run(self, work: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await work

        return self.runner.run(wait())

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.run(self.client.post(path, json=body))

    def completion(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **{"prompt": PROMPT, "max_tokens": 6} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def generate(self, sampling: dict[str, Any], **body: Any) -> Any:
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 6} | sampling} | body
        response = self.post("/generate", **body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    server = Server(tiny_model)
    yield server
    server.run(server.client.aclose())
    server.engine.close()
    server.runner.close()


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


# -- several answers -------------------------------------------------------------------------------


def test_n_answers_with_one_seed_differ_and_repeat(server: Server) -> None:
    first, again = (server.completion(n=4, seed=7, max_tokens=12) for _ in range(2))
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts(first))) == 4
    assert texts(again) == texts(first)
    assert texts(server.completion(seed=7, max_tokens=12)) == texts(first)[:1]


def test_choices_of_several_prompts_lie_behind_each_other(server: Server) -> None:
    prompts = [PROMPT, "A tree maps"]
    both = server.completion(prompt=prompts, n=2, seed=1)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    apart = [server.completion(prompt=prompt, n=2, seed=1) for prompt in prompts]
    assert texts(both) == [text for body in apart for text in texts(body)]
    sums = [sum(body["usage"][field] for body in apart) for field in ("prompt_tokens",)]
    assert [both["usage"]["prompt_tokens"]] == sums


@pytest.mark.parametrize("path", ENDPOINTS)
def test_streamed_choices_are_those_of_the_whole_answer(server: Server, path: str) -> None:
    body = ENDPOINTS[path] | {"n": 3, "seed": 5, "max_tokens": 9, "logprobs": True}
    body["logprobs"] = 2 if path == "/v1/completions" else True
    whole = server.post(path, **body).json()["choices"]
    pieces = events(server.post(path, **body, stream=True))
    for choice in whole:
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        if path == "/v1/completions":
            assert "".join(p["text"] for p in mine) == choice["text"]
        else:
            content = "".join(p["delta"].get("content") or "" for p in mine)
            assert content == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_best_of_gives_the_most_likely_answers_of_those_it_computes(server: Server) -> None:
    every = server.completion(n=6, seed=3, logprobs=0, max_tokens=8)
    best = server.completion(n=2, best_of=6, seed=3, max_tokens=8)
    means = [
        (sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]), c["text"])
        for c in every["choices"]
    ]
    assert texts(best) == [text for _, text in sorted(means, reverse=True)[:2]]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    assert best["choices"][0]["logprobs"] is None


def test_best_of_cannot_be_streamed(server: Server) -> None:
    response = server.post("/v1/completions", prompt="hi", best_of=3, stream=True)
    assert '"param":"best_of"' in response.text


def test_the_native_endpoint_lists_every_answer(server: Server) -> None:
    answers = server.generate({"n": 3, "sampling_seed": 2})
    assert len({answer["text"] for answer in answers}) == 3
    streamed = events(
        server.post(
            "/generate",
            text=PROMPT,
            sampling_params={"max_new_tokens": 6, "n": 3, "sampling_seed": 2},
            stream=True,
        )
    )
    last = {piece["index"]: piece for piece in streamed}
    assert [last[index]["text"] for index in range(3)] == [answer["text"] for answer in answers]


# -- prompt log-probabilities ----------------------------------------------------------------------


def test_an_echo_has_the_prompt_and_its_logprobs(server: Server) -> None:
    server.run(server.engine.flush_cache())
    cold = server.completion(echo=True, logprobs=0, temperature=0)
    [choice] = cold["choices"]
    assert choice["text"].startswith(PROMPT)
    lists, num_prompt_tokens = choice["logprobs"], cold["usage"]["prompt_tokens"]
    assert "".join(lists["tokens"][:num_prompt_tokens]) == PROMPT
    assert lists["text_offset"][num_prompt_tokens] == len(PROMPT)
    assert lists["token_logprobs"][0] is None
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    warm = server.completion(echo=True, logprobs=0, temperature=0)
    assert warm["choices"] == cold["choices"]
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == num_prompt_tokens - 1
    [alone] = server.completion(temperature=0)["choices"]
    assert choice["text"] == PROMPT + alone["text"]


def test_a_prompt_of_one_token_has_an_entry_without_a_logprob(server: Server) -> None:
    for max_tokens in (0, 1):
        [choice] = server.completion(prompt=[70], echo=True, logprobs=0, max_tokens=max_tokens)[
            "choices"
        ]
        lists = choice["logprobs"]
        assert choice["text"].startswith(lists["tokens"][0])
        assert lists["token_logprobs"][0] is None
        assert lists["text_offset"] == [0, len(lists["tokens"][0])][: max_tokens + 1]
    [choice] = server.completion(prompt=[70], prompt_logprobs=2, n=1)["choices"]
    assert choice["prompt_logprobs"] == [None]
    answer = server.post("/generate", input_ids=[70], return_logprob=True, logprob_start_len=0)
    assert answer.json()["meta_info"]["input_token_logprobs"] == [[None, 70, None]]


def test_an_echo_without_an_answer_only_scores(server: Server) -> None:
    body = server.completion(echo=True, logprobs=2, max_tokens=0)
    [choice] = body["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    top = choice["logprobs"]["top_logprobs"]
    assert top[0] is None
    assert all(2 <= len(entry) <= 3 for entry in top[1:])
    [plain] = server.completion(echo=True, max_tokens=0)["choices"]
    assert plain["text"] == PROMPT
    assert plain["logprobs"] is None


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_echo_is_the_whole_one(server: Server, n: int) -> None:
    body = {"prompt": [PROMPT, "A tree"], "echo": True, "logprobs": 1, "seed": 4, "max_tokens": 5}
    body["n"] = n
    whole = server.post("/v1/completions", **body).json()["choices"]
    pieces = events(server.post("/v1/completions", **body, stream=True))
    for choice in whole:
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in mine) == choice["text"]
        for field, values in choice["logprobs"].items():
            told = [v for p in mine if p["logprobs"] for v in p["logprobs"][field]]
            assert told == values, field


@pytest.mark.parametrize("path", ENDPOINTS)
def test_prompt_logprobs_come_as_vllm_gives_them(server: Server, path: str) -> None:
    response = server.post(path, **ENDPOINTS[path], prompt_logprobs=3, max_tokens=1)
    body = response.json()
    holder = body if "chat" in path else body["choices"][0]
    first, *others = holder["prompt_logprobs"]
    assert first is None
    assert len(others) == body["usage"]["prompt_tokens"] - 1
    for entry in others:
        ranks = sorted(token["rank"] for token in entry.values() if token["rank"])
        assert ranks == [1, 2, 3]
        by_rank = sorted(entry.values(), key=lambda token: token["rank"] or 99)
        values = [token["logprob"] for token in by_rank]
        assert values == sorted(values, reverse=True)
    [opening, *_] = events(
        server.post(path, **ENDPOINTS[path], prompt_logprobs=3, max_tokens=1, stream=True)
    )
    [choice] = opening["choices"]
    assert choice["prompt_logprobs"] == holder["prompt_logprobs"]


def test_the_native_endpoint_scores_a_prompt_from_a_position_on(server: Server) -> None:
    whole = server.generate({}, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = whole["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    late = server.generate({}, return_logprob=True, logprob_start_len=4, top_logprobs_num=2)
    for field in ("input_token_logprobs", "input_top_logprobs"):
        assert late["meta_info"][field] == meta[field][4:]
    none = server.generate({}, return_logprob=True)
    assert none["meta_info"]["input_token_logprobs"] == []


def test_every_streamed_answer_has_the_prompt_logprobs_it_has_whole(server: Server) -> None:
    body = {"prompt": [PROMPT, "A tree"], "prompt_logprobs": 1, "seed": 4, "max_tokens": 3, "n": 2}
    whole = server.post("/v1/completions", **body).json()["choices"]
    pieces = events(server.post("/v1/completions", **body, stream=True))
    told = [
        choice for piece in pieces for choice in piece["choices"] if "prompt_logprobs" in choice
    ]
    by_index = {choice["index"]: choice["prompt_logprobs"] for choice in told}
    assert len(told) == len(whole) == 4
    assert by_index == {choice["index"]: choice["prompt_logprobs"] for choice in whole}

    native = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 1}
    native["sampling_params"] = {"max_new_tokens": 3, "n": 2, "sampling_seed": 4}
    streamed = events(server.post("/generate", **native, stream=True))
    last = {piece["index"]: piece["meta_info"]["input_token_logprobs"] for piece in streamed}
    for index, answer in enumerate(server.post("/generate", **native).json()):
        assert last[index] == answer["meta_info"]["input_token_logprobs"]


# -- what is done to logits ------------------------------------------------------------------------


def test_a_bias_decides_and_a_ban_takes_back(server: Server) -> None:
    ids = server.generate({"logit_bias": {"70": 100}, "temperature": 0})["output_ids"]
    assert ids == [70] * 6
    allowed = server.generate({"allowed_token_ids": [70, 71, 72], "sampling_seed": 1})
    assert set(allowed["output_ids"]) <= {70, 71, 72}
    banned = {"allowed_token_ids": [70, 71], "banned_token_ids": [70]}
    assert server.generate(banned)["output_ids"] == [71] * 6


def test_penalties_end_a_repetition(server: Server) -> None:
    biased = {"logit_bias": {"70": 30}, "temperature": 0, "max_new_tokens": 12}
    assert server.generate(biased)["output_ids"] == [70] * 12
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 5}):
        small = biased | {"logit_bias": {"70": 3}} | penalty
        plain = server.generate(biased | {"logit_bias": {"70": 3}})["output_ids"]
        assert server.generate(small)["output_ids"].count(70) <= plain.count(70)


def test_a_stop_regex_ends_the_answer_before_its_match(server: Server) -> None:
    plain = server.generate({"temperature": 0, "max_new_tokens": 20})["text"]
    at = next(i for i in range(3, len(plain)) if plain[i].isascii() and plain[i].isalnum())
    pattern = f"[{plain[at]}]"
    answer = server.generate({"temperature": 0, "max_new_tokens": 20, "stop_regex": pattern})
    assert answer["text"] == plain[: plain.index(plain[at])]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}


# -- refusals --------------------------------------------------------------------------------------

REFUSED = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 17}, "n"),  # more than can be worked on at once
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 4, "temperature": 0}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1}, "banned_token_ids": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [100000]}, "allowed_token_ids"),
    ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
    ({"banned_token_ids": [-1]}, "banned_token_ids"),
    ({"banned_token_ids": list(range(400))}, "banned_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs_start": 1}, "prompt_logprobs_start"),
    ({"prompt_logprobs": 0, "prompt_logprobs_start": 1000}, "prompt_logprobs_start"),
    ({"echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "n": 2, "echo": True}, "n"),
    ({"stop_regex": "(a"}, "stop_regex"),
    ({"stop_regex": "a*"}, "stop_regex"),
    ({"stop_regex": "a{1000}{1000}"}, "stop_regex"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"bad_words": ["x"]}, "bad_words"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(f)[:50] for f, _ in REFUSED])
def test_a_wrong_option_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    response = server.post("/v1/completions", **{"prompt": PROMPT, "max_tokens": 2} | fields)
    assert error(response)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_params": {"n": 17}}, "sampling_params.n"),
        ({"sampling_params": {"logit_bias": {"999": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"banned_token_ids": [999]}}, "sampling_params.banned_token_ids"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ],
)
def test_the_native_endpoint_refuses_in_its_own_words(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    refusal = error(server.post("/generate", text=PROMPT, **fields))
    assert refusal["param"] == param
    assert refusal["message"].startswith(param.rpartition(".")[2])


# -- whatever is asked -----------------------------------------------------------------------------

CHOICES: dict[str, list[Any]] = {
    "n": [1, 2, 3, 16],
    "best_of": [1, 3, 8],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 1, 5],
    "min_p": [0, 0.5],
    "seed": [0, 1, -5],
    "max_tokens": [0, 1, 5],
    "min_tokens": [0, 2, 9],
    "frequency_penalty": [-2, 0.5, 3],
    "presence_penalty": [-1, 2],
    "repetition_penalty": [0.5, 1.3, 0],
    "logit_bias": [{}, {"70": 100}, {"2": -100}, {"71": 1e9}],
    "allowed_token_ids": [[70, 71], [2], list(range(300)), []],
    "banned_token_ids": [[70], list(range(300)), [2]],
    "stop": ["a", ["b", "c"], []],
    "stop_regex": ["[0-9]+", "a|b", "x*", ["e.", "q"]],
    "stop_token_ids": [[70], []],
    "ignore_eos": [True, False],
    "logprobs": [0, 1, 20, 21],
    "prompt_logprobs": [0, 3, 20],
    "prompt_logprobs_start": [0, 2, 999],
    "echo": [True, False],
    "stream": [True, False],
}


def random_body(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(sorted(CHOICES), draw.randint(1, 8))
    body = {name: draw.choice(CHOICES[name]) for name in names}
    shared = draw.choice(["", "The quick brown fox", "A tree maps prefixes to blocks; "])
    return {"prompt": f"{shared} {draw.randint(0, 5)}", "max_tokens": 3} | body


def check_random_options(server: Server, num_requests: int) -> None:
    """Requests with random options, eight at a time and each eight beside a control request."""
    draw = random.Random(11)
    control = {"prompt": "Numbers such as", "temperature": 0, "max_tokens": 12, "logprobs": 0}

    async def round_of(bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        sent = [server.client.post("/v1/completions", json=body) for body in bodies]
        return await asyncio.gather(*sent)

    expected = server.post("/v1/completions", **control).json()["choices"]
    outcomes = {200: 0, 400: 0}
    for _ in range(math.ceil(num_requests / 8)):
        bodies = [random_body(draw) for _ in range(8)]
        first, *others = server.run(round_of([control, *bodies]))
        assert first.json()["choices"] == expected, bodies
        for body, response in zip(bodies, others, strict=True):
            assert response.status_code in outcomes, (body, response.text)
            outcomes[response.status_code] += 1
            if response.status_code == 400:
                assert error(response)["param"], body
            elif body.get("stream") and '"error"' in response.text:
                assert '"code":400' in response.text or "invalid_request_error" in response.text
    assert min(outcomes.values()) > num_requests // 20, outcomes


def test_random_options_are_answered_or_refused_and_disturb_nobody(server: Server) -> None:
    check_random_options(server, 160)


@pytest.mark.slow
def test_5000_random_options_are_answered_or_refused_and_disturb_nobody(server: Server) -> None:
    check_random_options(server, 5000)


def test_every_pair_of_options_is_answered_or_refused(server: Server) -> None:
    """With one value of each, drawn anew for each pair."""
    draw = random.Random(2)
    statuses = set()
    for one, other in itertools.combinations(sorted(CHOICES), 2):
        pair = {name: draw.choice(CHOICES[name]) for name in (one, other)}
        response = server.post("/v1/completions", **{"prompt": "x y", "max_tokens": 2} | pair)
        assert response.status_code in (200, 400), (pair, response.text)
        statuses.add(response.status_code)
    assert statuses == {200, 400}
