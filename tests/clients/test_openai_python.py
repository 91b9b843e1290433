"""OpenAI's Python library, unmodified, against our server. Works with its versions 2 and 3."""

import asyncio
from typing import Any

import pytest

openai = pytest.importorskip("openai")

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(base_url: str) -> Any:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: Any) -> str:
    return client.models.list().data[0].id


def test_models_are_listed_and_found(client, model):
    found = client.models.retrieve(model)
    assert found.id == model
    assert found.max_model_len > 0


def test_a_chat_is_answered(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id


def test_an_answer_that_is_sent_back_as_a_message_is_taken(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    history = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(model=model, messages=history, **GREEDY)
    assert second.choices[0].message.content
    dumped = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "?"}]
    assert client.chat.completions.create(model=model, messages=dumped, **GREEDY).choices


def test_a_prompt_that_was_seen_is_cached(client, model):
    counts = [
        client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY).usage
        for _ in range(2)
    ]
    assert counts[1].prompt_tokens_details.cached_tokens == counts[1].prompt_tokens - 1


def test_a_stream_says_the_same_as_a_whole_answer(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_builds_the_answer(client, model):
    # The helper raises by itself where the answer was cut at max_tokens.
    with client.chat.completions.stream(model=model, messages=MESSAGES, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_a_stream_that_is_left_does_not_disturb_the_next_request(client, model):
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, max_tokens=200
    )
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY).choices


def test_logprobs_have_their_bytes_and_alternatives(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, temperature=0, max_tokens=4
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.logprob <= 0
    text = bytes(byte for entry in content for byte in entry.bytes).decode()
    assert text.startswith(answer.choices[0].message.content)


def test_the_same_seed_gives_the_same_answer(client, model):
    def content(seed: int) -> str:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, seed=seed, temperature=1.5, max_tokens=24
        )
        return answer.choices[0].message.content

    assert content(1) == content(1)
    assert content(1) != content(2)


def test_a_stop_string_is_not_in_the_answer(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    text = whole.choices[0].message.content
    stop = text[3:6]
    cut = client.chat.completions.create(model=model, messages=MESSAGES, stop=[stop], **GREEDY)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_completions_take_text_and_token_ids_one_or_many(client, model):
    for prompt, number in (("Once", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        answer = client.completions.create(model=model, prompt=prompt, logprobs=2, **GREEDY)
        assert len(answer.choices) == number
        for choice in answer.choices:
            logprobs = choice.logprobs
            assert len(logprobs.tokens) == len(logprobs.token_logprobs) > 0
            assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset)


def test_a_stream_of_completions_says_the_same_as_a_whole_answer(client, model):
    whole = client.completions.create(model=model, prompt=["Once", "The"], **GREEDY)
    texts = ["", ""]
    for chunk in client.completions.create(
        model=model, prompt=["Once", "The"], stream=True, **GREEDY
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_our_extras_go_through_the_extra_body(client, model):
    extras = {"top_k": 1, "min_p": 0.1, "min_tokens": 3, "ignore_eos": True}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=40, extra_body=extras
    )
    assert answer.usage.completion_tokens >= 3


def test_errors_are_the_librarys_own(client, model):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=MESSAGES, n=500)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "word " * 20_000}]
        )
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is" in refused.value.message
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.responses.create(model=model, input="hi")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)


def test_many_requests_at_once_are_all_answered(base_url, model):
    async def ask() -> list[Any]:
        url = f"{base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            calls = [
                client.chat.completions.create(
                    model=model,
                    messages=[*MESSAGES, {"role": "user", "content": f"number {i}"}],
                    **GREEDY,
                )
                for i in range(16)
            ]
            return await asyncio.gather(*calls)

    assert all(answer.choices[0].message.content for answer in asyncio.run(ask()))
