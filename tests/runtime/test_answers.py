"""Several answers, prompt log-probabilities and reasoning through the engine, on a tiny random
model; and what is told of answers that are written in a format."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sapwood import Engine, FinishReason, RequestError, RequestOutput, SamplingParams
from sapwood.runtime.answer_format import AnswerParts
from sapwood.runtime.answers import AnswerBuilder
from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.constraints.spec import ConstraintSpec, Whitespace
from sapwood.runtime.errors import EngineError
from sapwood.runtime.outputs import RequestMetrics
from sapwood.runtime.reasoning import REASONING_TAGS, ReasoningFormat
from sapwood.runtime.reasoning_block import ReasoningStart
from sapwood.runtime.request import Request, SequenceOutput
from tests.conftest import tiny_tokenizer
from tests.runtime.automata import Automaton, AutomatonMatcher
from tests.runtime.test_engine import assert_nothing_held, tiny_engine

PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so"
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with tiny_engine(tiny_model, quantize="none") as engine:
        yield engine


def logprobs_of(output: RequestOutput) -> np.ndarray:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    return np.array([entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None])


def num_computed(engine: Engine) -> int:
    engine._core.tree().result()
    return engine.stats().computed_tokens


def test_prompt_logprobs_are_those_of_transformers(engine: Engine, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    [output] = engine.generate(PROMPT, SCORED)
    ids = torch.from_numpy(output.prompt_token_ids.astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0].log_softmax(-1)
    own = expected[:-1].gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs_of(output), own, atol=1e-4)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=3)
    [output] = engine.generate(PROMPT, sampling)
    assert output.prompt_logprobs is not None
    best = expected.topk(3)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.token_id == ids[position + 1]
        assert [other.token_id for other in entry.top] == best.indices[position].tolist()


@pytest.mark.parametrize("block_size", [1, 16])
def test_warm_prompt_logprobs_are_the_cold_ones_and_cost_one_token(
    tiny_model: Path, block_size: int
) -> None:
    with tiny_engine(tiny_model, block_size=block_size, max_num_batched_tokens=16,
                     max_num_seqs=8) as engine:  # fmt: skip
        [cold] = engine.generate(PROMPT, SCORED)
        before = num_computed(engine)
        only_scores = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [warm] = engine.generate(PROMPT, only_scores)
        assert num_computed(engine) == before + 1
        np.testing.assert_array_equal(logprobs_of(warm), logprobs_of(cold))
        assert warm.outputs[0].token_ids == ()
        # One that shares a part of it, beside others.
        longer, _, _ = engine.generate([PROMPT + " again, and", "A tree", "Numbers"], SCORED)
        with tiny_engine(tiny_model) as other:
            [expected] = other.generate(PROMPT + " again, and", SCORED)
        np.testing.assert_allclose(logprobs_of(longer), logprobs_of(expected), atol=1e-4)
        assert_nothing_held(engine)


def test_generated_logprobs_are_the_prompt_logprobs_of_the_longer_prompt(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=10, logprobs=True)
    [output] = engine.generate(PROMPT, sampling)
    [answer] = output.outputs
    prompt = [*output.prompt_token_ids.tolist(), *answer.token_ids]
    [scored] = engine.generate(prompt, SCORED)
    told = [entry.logprob for entry in answer.logprobs or ()]
    np.testing.assert_allclose(logprobs_of(scored)[-len(told) :], told, atol=1e-4)


def test_answers_with_one_seed_differ_and_repeat_wherever_they_run(
    engine: Engine, tiny_model: Path
) -> None:
    sampling = SamplingParams(seed=11, n=4, max_tokens=12)

    def texts(output: RequestOutput) -> list[str]:
        return [answer.text for answer in output.outputs]

    [alone] = engine.generate(PROMPT, sampling)
    assert len(set(texts(alone))) == 4
    crowd = [SamplingParams(seed=i, max_tokens=12) for i in range(28)]
    crowded = engine.generate([PROMPT] * 29, [sampling, *crowd])
    assert texts(crowded[0]) == texts(alone)
    options = {"num_kv_blocks": 12, "block_size": 4, "max_model_len": 48, "quantize": "none"}
    with tiny_engine(tiny_model, **options) as tight:
        [elsewhere] = tight.generate(PROMPT, sampling)
        assert tight.stats().num_preemptions
        assert texts(elsewhere) == texts(alone)
        assert_nothing_held(tight)
    [single] = engine.generate(PROMPT, SamplingParams(seed=11, max_tokens=12))
    assert texts(single) == texts(alone)[:1]


def test_a_stream_of_several_answers_ends_when_all_have(engine: Engine) -> None:
    sampling = SamplingParams(seed=1, n=3, max_tokens=7)
    [whole] = engine.generate(PROMPT, sampling)
    told: dict[int, str] = {}
    for piece in engine.stream(PROMPT, sampling):
        [answer] = piece.outputs
        told[answer.index] = told.get(answer.index, "") + answer.text
    assert told == {answer.index: answer.text for answer in whole.outputs}


def test_best_of_cannot_be_streamed(engine: Engine) -> None:
    with pytest.raises(RequestError, match="best_of"):
        next(engine.stream(PROMPT, SamplingParams(n=1, best_of=2)))


def test_leaving_a_stream_ends_every_answer(engine: Engine) -> None:
    for _ in engine.stream(PROMPT, SamplingParams(n=5, max_tokens=500, ignore_eos=True)):
        break
    assert_nothing_held(engine)


OPEN_TAG, CLOSE_TAG, END_TOKEN = 256, 257, 258  # special tokens, behind one for each byte
TOKEN_BYTES = (*(bytes([byte]) for byte in range(256)), b"", b"", b"")
VISIBLE = {OPEN_TAG: b"<think>", CLOSE_TAG: b"</think>"}
WRITTEN = [*b"\n", OPEN_TAG, *"\nwhy not é?\n".encode(), CLOSE_TAG, *"\n\nSo é.".encode()]


def request_of(
    answer_format: ReasoningFormat | None,
    sampling: SamplingParams,
    visible: Mapping[int, bytes] = VISIBLE,
) -> Request:
    return Request(
        request_id="0",
        caller_id="r",
        prompt_token_ids=np.array([1], np.int32),
        sampling=sampling,
        max_tokens=100,
        seed=0,
        eos_token_ids=(END_TOKEN,),
        arrival_time=0.0,
        answer_format=answer_format,
        visible_tokens=visible,
    )


def told(
    token_ids: Sequence[int], reason: FinishReason | None = None, by_token: bool = False
) -> SequenceOutput:
    return SequenceOutput(
        request_id="0",
        token_ids=tuple(token_ids),
        finish_reason=reason,
        ended_by_token=by_token,
        metrics=RequestMetrics(arrival_time=0.0),
    )


def either(*, separate: bool = True) -> ReasoningFormat:
    tags, start = REASONING_TAGS["think"], ReasoningStart.EITHER
    return ReasoningFormat(tags=tags, start=start, separate=separate)


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_in_a_format_tells_its_parts_beside_the_text_as_it_was_written(seed: int) -> None:
    draw, builder = (
        random.Random(seed),
        AnswerBuilder(request_of(either(), SamplingParams()), TOKEN_BYTES),
    )
    rest, pieces = [*WRITTEN, END_TOKEN], []
    while len(rest) > 6:
        length = draw.randint(1, 5)
        pieces.append(builder.add(told(rest[:length])))
        rest = rest[length:]
    pieces.append(builder.add(told(rest, FinishReason.STOP, by_token=True)))
    [whole] = builder.whole().outputs
    assert whole.text == "\n<think>\nwhy not é?\n</think>\n\nSo é."
    assert whole.parts == AnswerParts(reasoning="why not é?", content="So é.")
    assert whole.num_reasoning_tokens == 1 + 1 + len("\nwhy not é?\n".encode()) + 1
    parts = [piece.outputs[0].parts for piece in pieces]
    assert "".join(part.content for part in parts if part) == "So é."
    assert "".join(part.reasoning for part in parts if part) == "why not é?"
    assert sum(p.num_reasoning_tokens for p in pieces) == whole.num_reasoning_tokens


def test_a_block_that_is_not_separated_is_counted_all_the_same() -> None:
    builder = AnswerBuilder(request_of(either(separate=False), SamplingParams()), TOKEN_BYTES)
    builder.add(told(WRITTEN, FinishReason.LENGTH))
    [whole] = builder.whole().outputs
    assert whole.parts == AnswerParts(content=whole.text)
    assert whole.num_reasoning_tokens > 3


def test_without_a_format_there_are_no_parts_and_no_special_tokens() -> None:
    builder = AnswerBuilder(request_of(None, SamplingParams(), {}), TOKEN_BYTES)
    builder.add(told(WRITTEN, FinishReason.LENGTH))
    [whole] = builder.whole().outputs
    assert whole.parts is None
    assert whole.num_reasoning_tokens == 0
    assert whole.text == "\n\nwhy not é?\n\n\nSo é."


def test_a_stop_string_may_be_a_marker_or_in_the_content() -> None:
    for stop, parts in (
        ("</think>", AnswerParts(reasoning="why not é?\n")),
        ("é.", AnswerParts(reasoning="why not é?", content="So ")),
    ):
        builder = AnswerBuilder(request_of(either(), SamplingParams(stop=(stop,))), TOKEN_BYTES)
        for token_id in WRITTEN:
            builder.add(told([token_id]))
        builder.add(told([], FinishReason.STOP))
        assert builder.whole().outputs[0].parts == parts


THINKER = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
QUESTION = [{"role": "user", "content": "The quick brown fox?"}]
CAPPED = SamplingParams(max_tokens=20, max_reasoning_tokens=6, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def thinker(
    write_model: Callable[[Path, Mapping[str, Any]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A tiny model whose template opens a block of reasoning."""
    folder = write_model(tmp_path_factory.mktemp("thinker"), {})
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "chat_template": THINKER}
    path.write_text(json.dumps(config))
    return folder


def test_reasoning_ends_at_its_cap_whoever_appends_the_tag(thinker: Path) -> None:
    answers = []
    for jump_forward in (True, False):
        with tiny_engine(thinker, jump_forward=jump_forward, quantize="none") as engine:
            [output] = engine.generate(Chat(QUESTION), CAPPED)
            [answer] = output.outputs
            streamed = list(engine.stream(Chat(QUESTION), CAPPED))
            text = "".join(piece.outputs[0].text for piece in streamed)
            parts = [piece.outputs[0].parts for piece in streamed]
            assert text == answer.text
            assert answer.parts is not None
            assert "".join(part.reasoning for part in parts if part) == answer.parts.reasoning
            assert "".join(part.content for part in parts if part) == answer.parts.content
            assert sum(p.num_reasoning_tokens for p in streamed) == answer.num_reasoning_tokens
            assert_nothing_held(engine)
            num_tag_tokens = len(engine.tokenizer.encode("</think>"))
        assert answer.text.count("</think>") == 1
        assert answer.num_reasoning_tokens == 6 + num_tag_tokens
        assert len(answer.token_ids) == 20
        answers.append(answer)
    assert answers[0] == answers[1]


def test_without_a_block_to_come_a_cap_changes_nothing(thinker: Path) -> None:
    with tiny_engine(thinker, quantize="none") as engine:
        for options in (
            ChatOptions(chat_template_kwargs={"enable_thinking": False}),
            ChatOptions(reasoning_effort="none"),
        ):
            [output] = engine.generate(Chat(QUESTION, options), CAPPED)
            [answer] = output.outputs
            assert answer.parts == AnswerParts(content=answer.text)
            assert answer.num_reasoning_tokens == 0
        with pytest.raises(RequestError, match="conversations of a model that reasons") as refusal:
            engine.generate("plain", CAPPED)
        assert refusal.value.param == "max_reasoning_tokens"
        assert "this is a plain prompt" in str(refusal.value)


def test_a_cap_is_refused_by_models_that_do_not_reason(engine: Engine, thinker: Path) -> None:
    with pytest.raises(RequestError, match="leave it out"):
        engine.generate(Chat(QUESTION), CAPPED)
    with (
        tiny_engine(thinker, reasoning="none", quantize="none") as other,
        pytest.raises(RequestError, match="leave it out"),
    ):
        other.generate(Chat(QUESTION), CAPPED)


def test_the_content_satisfies_its_constraint_with_and_without_reasoning(thinker: Path) -> None:
    """Whoever appends what is forced, and for every answer of several."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    constraint = ConstraintSpec.json_schema(schema, whitespace=Whitespace.COMPACT)
    both = (ChatOptions(), ChatOptions(reasoning_effort="none"))
    told = []
    for jump_forward in (True, False):
        with tiny_engine(thinker, jump_forward=jump_forward, quantize="none") as engine:
            for seed, options in itertools.product(range(4), both):
                sampling = SamplingParams(
                    max_tokens=200, max_reasoning_tokens=8, seed=seed, n=2, constraint=constraint
                )
                [output] = engine.generate(Chat(QUESTION, options), sampling)
                for answer in output.outputs:
                    assert answer.finish_reason is FinishReason.STOP
                    assert answer.parts is not None
                    assert set(json.loads(answer.parts.content)) == {"name", "age"}
                    reasons = options.reasoning_effort is None
                    assert answer.text.count("</think>") == reasons
                    assert (answer.num_reasoning_tokens > 0) == reasons
                    told.append(answer.token_ids)
            assert_nothing_held(engine)
    half = len(told) // 2
    assert told[:half] == told[half:]


@pytest.fixture(scope="module")
def magistrate(
    write_model: Callable[[Path, Mapping[str, Any]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A tiny model whose tags are special tokens, which its template does not write."""
    vocab_size = tiny_tokenizer().get_vocab_size() + 2
    folder = write_model(tmp_path_factory.mktemp("magistrate"), {"vocab_size": vocab_size})
    tokenizer = Backend.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("[THINK]", "[/THINK]")])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = THINKER.replace("<think>", "").replace("</think>", "[/THINK]")
    path.write_text(json.dumps(config))
    return folder


def test_tags_that_are_special_tokens_are_read_and_may_be_stops(magistrate: Path) -> None:
    opened = Chat(
        [*QUESTION, {"role": "assistant", "content": "[THINK]the fox"}],
        ChatOptions(continue_final_message=True),
    )
    constraint = ConstraintSpec.choice(["fox", "dog"])
    sampling = SamplingParams(max_reasoning_tokens=5, seed=1, constraint=constraint)
    with tiny_engine(magistrate, quantize="none") as engine:
        closing = engine.tokenizer.special_id("[/THINK]")
        [output] = engine.generate(opened, sampling)
        [answer] = output.outputs
        assert answer.token_ids[5] == closing
        assert answer.num_reasoning_tokens == 6
        assert answer.parts is not None
        reasoning, _, content = answer.text.partition("[/THINK]")
        assert answer.parts.reasoning == reasoning.strip("\n")
        assert answer.parts.content == content.lstrip("\n")
        assert answer.parts.content in ("fox", "dog")
        [output] = engine.generate(opened, replace(sampling, stop=("[/THINK]",)))
        assert output.outputs[0].stop_reason == "[/THINK]"
        assert output.outputs[0].text == reasoning
        [output] = engine.generate(Chat(QUESTION), replace(sampling, max_tokens=60))
        [answer] = output.outputs  # with a block or without
        assert answer.parts is not None
        assert answer.parts.content in ("fox", "dog")
        assert_nothing_held(engine)


def test_a_required_tool_call_follows_the_reasoning(thinker: Path) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    sampling = SamplingParams(max_tokens=300, max_reasoning_tokens=4, seed=2)
    options = ChatOptions(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    with tiny_engine(thinker, tool_format="generic", quantize="none") as engine:
        [output] = engine.generate(Chat(QUESTION, options), sampling)
        [answer] = output.outputs
        assert answer.finish_reason is FinishReason.STOP, answer.text
        assert answer.parts is not None
        [call] = answer.parts.tool_calls
        assert (call.name, json.loads(call.arguments)["city"]) == ("weather", "Rome")
        assert answer.parts.reasoning == answer.text.partition("</think>")[0].strip("\n")
        assert answer.parts.content == ""


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason"),
    [(FinishReason.STOP, None), (FinishReason.STOP, "!"), (FinishReason.LENGTH, None)],
)
def test_a_whole_answer_that_breaks_its_constraint_is_an_error(
    finish_reason: FinishReason, stop_reason: str | None
) -> None:
    """Masks of some backends do not enforce all of a constraint; a cut answer is not judged."""

    class Judge(AutomatonMatcher):
        def verdict(self, text: bytes) -> str | None:
            return "it says no" if text == b"no" else None

    request = Request(
        request_id="0", caller_id="0", prompt_token_ids=np.array([1], np.int32),
        sampling=SamplingParams(), max_tokens=9, seed=0, eos_token_ids=(), arrival_time=0.0,
        matcher=Judge(Automaton.of_path([1, 2])),
    )  # fmt: skip
    for tokens, is_broken in (((1, 2), True), ((1, 1), False)):
        builder = AnswerBuilder(request, [b"", b"n", b"o"])
        last = SequenceOutput(
            request_id="0", token_ids=tokens[1:], finish_reason=finish_reason,
            stop_reason=stop_reason, metrics=RequestMetrics(arrival_time=0.0),
        )  # fmt: skip
        builder.add(replace(last, token_ids=tokens[:1], finish_reason=None, stop_reason=None))
        if is_broken and finish_reason is FinishReason.STOP and stop_reason is None:
            with pytest.raises(EngineError, match="it says no"):
                builder.add(last)
        else:
            assert builder.add(last).finished
