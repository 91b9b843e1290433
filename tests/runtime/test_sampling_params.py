"""What may be asked of sampling: ranges, contradictions, and what is kept of it."""

from dataclasses import replace

import pytest

from sapwood import ConstraintSpec, RequestError, SamplingParams
from sapwood.runtime.constraints.spec import ConstraintKind

HUGE = 10**5000  # has more digits than Python prints
DIGITS = ConstraintSpec.regex("[0-9]+")


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ["ok", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "7"}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "best_of": 2}, "best_of"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens"),
        ({"frequency_penalty": 2.01}, "frequency_penalty"),
        ({"frequency_penalty": -2.01}, "frequency_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"frequency_penalty": None}, "frequency_penalty"),
        ({"frequency_penalty": HUGE}, "frequency_penalty"),
        ({"presence_penalty": 2.01}, "presence_penalty"),
        ({"presence_penalty": -2.01}, "presence_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"presence_penalty": float("-inf")}, "presence_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"presence_penalty": HUGE}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"repetition_penalty": False}, "repetition_penalty"),
        ({"repetition_penalty": None}, "repetition_penalty"),
        ({"logit_bias": {"123": 1.0}}, "logit_bias"),
        ({"logit_bias": {1: "2"}}, "logit_bias"),
        ({"logit_bias": {1: True}}, "logit_bias"),
        ({"logit_bias": {True: 1}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {HUGE: 1}}, "logit_bias"),
        ({"logit_bias": {1: HUGE}}, "logit_bias"),
        ({"logit_bias": {1.0: 1}}, "logit_bias"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias"),
        ({"logit_bias": ((1, 2.0, 3),)}, "logit_bias"),
        ({"logit_bias": (([], 1.0),)}, "logit_bias"),
        ({"logit_bias": "12"}, "logit_bias"),
        ({"logit_bias": None}, "logit_bias"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids"),
        ({"allowed_token_ids": b"12"}, "allowed_token_ids"),
        ({"allowed_token_ids": 7}, "allowed_token_ids"),
        ({"allowed_token_ids": [HUGE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [[1]]}, "allowed_token_ids"),
        ({"allowed_token_ids": range(65_537)}, "allowed_token_ids"),
        ({"allowed_token_ids": {1: 2}}, "allowed_token_ids"),
        ({"banned_token_ids": [-1]}, "banned_token_ids"),
        ({"banned_token_ids": [1.5]}, "banned_token_ids"),
        ({"banned_token_ids": [True]}, "banned_token_ids"),
        ({"banned_token_ids": "12"}, "banned_token_ids"),
        ({"banned_token_ids": b"12"}, "banned_token_ids"),
        ({"banned_token_ids": 7}, "banned_token_ids"),
        ({"banned_token_ids": [HUGE]}, "banned_token_ids"),
        ({"banned_token_ids": [[1]]}, "banned_token_ids"),
        ({"banned_token_ids": range(65_537)}, "banned_token_ids"),
        ({"banned_token_ids": {1: 2}}, "banned_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"banned_token_ids": None}, "banned_token_ids"),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1, 3]}, "banned_token_ids"),
        ({"banned_token_ids": [5], "logit_bias": {5: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [5], "logit_bias": {6: 1.0}}, "logit_bias"),
        (
            {"allowed_token_ids": [5, 6], "banned_token_ids": [6], "logit_bias": {6: 1.0}},
            "logit_bias",
        ),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": None}, "n"),
        ({"n": HUGE}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"n": 2, "best_of": 3, "temperature": 0}, "best_of"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
        ({"prompt_logprobs": HUGE}, "prompt_logprobs"),
        ({"prompt_logprobs_start": 3}, "prompt_logprobs_start"),
        ({"prompt_logprobs": 0, "prompt_logprobs_start": -1}, "prompt_logprobs_start"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": "a*"}, "stop_regex"),
        ({"stop_regex": ""}, "stop_regex"),
        ({"stop_regex": ["a", ""]}, "stop_regex"),
        ({"stop_regex": "^a"}, "stop_regex"),
        ({"stop_regex": r"(a)\1"}, "stop_regex"),
        ({"stop_regex": "(?=a)b"}, "stop_regex"),
        ({"stop_regex": "a" * 513}, "stop_regex"),
        ({"stop_regex": "a{257}"}, "stop_regex"),
        ({"stop_regex": ["a{150}"] * 2}, "stop_regex"),
        ({"stop_regex": ["a"] * 17}, "stop_regex"),
        ({"stop_regex": "\ud800"}, "stop_regex"),
        ({"stop_regex": [1]}, "stop_regex"),
        ({"stop_regex": None}, "stop_regex"),
        ({"stop_regex": b"a"}, "stop_regex"),
        ({"stop_regex": {"a": 1}}, "stop_regex"),
        ({"temperature": HUGE}, "temperature"),
        ({"top_p": HUGE}, "top_p"),
        ({"min_p": HUGE}, "min_p"),
        ({"top_k": HUGE}, "top_k"),
        ({"max_tokens": HUGE}, "max_tokens"),
        ({"seed": HUGE}, "seed"),
        ({"temperature": [HUGE]}, "temperature"),
        ({"temperature": "\ud800"}, "temperature"),
        ({"stop": {"a": 1}}, "stop"),
        ({"constraint": "[0-9]+"}, "constraint"),
        ({"constraint": {"type": "object"}}, "constraint"),
        ({"constraint": int}, "constraint"),
        ({"constraint": ConstraintSpec.regex("")}, "constraint"),
        ({"constraint": ConstraintSpec.choice([])}, "constraint"),
        (
            {"constraint": ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text="{" * 300_000)},
            "constraint",
        ),
        ({"constraint": DIGITS, "max_tokens": 0, "prompt_logprobs": 0}, "constraint"),
        ({"constraint": DIGITS, "min_tokens": 1}, "min_tokens"),
        ({"constraint": DIGITS, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"constraint": DIGITS, "banned_token_ids": [1]}, "banned_token_ids"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": True}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": 1.5}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": HUGE}, "max_reasoning_tokens"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(params: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as info:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert info.value.param == param
    assert len(str(info.value)) < 400


@pytest.mark.parametrize(
    "params",
    [
        {"n": 4, "temperature": 0},
        {"n": 2, "best_of": 2, "temperature": 0},
        {"n": 2, "best_of": 5},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 0, "prompt_logprobs": 20, "prompt_logprobs_start": 7, "best_of": 1},
        {"frequency_penalty": -2, "presence_penalty": 2.0, "repetition_penalty": 10},
        {"repetition_penalty": 1e-6},
        {"logit_bias": {0: 100, 5: -100}},
        {"allowed_token_ids": [3], "banned_token_ids": [2], "logit_bias": {3: 1}},
        {"allowed_token_ids": range(65_536), "stop_token_ids": [1]},
        {"stop": "a", "stop_regex": ["a", "b+c"], "min_tokens": 3},
        {"constraint": DIGITS, "stop": "a", "stop_regex": "b", "stop_token_ids": [3]},
        {"constraint": DIGITS, "ignore_eos": True, "logit_bias": {3: -100}, "top_k": 1},
        {"constraint": DIGITS, "n": 2, "best_of": 4, "frequency_penalty": 1},
        {"constraint": DIGITS, "max_tokens": 1, "prompt_logprobs": 0, "logprobs": True},
        {"constraint": DIGITS, "banned_token_ids": [], "max_tokens": None},
        {"max_reasoning_tokens": 1},
    ],
)
def test_what_is_unusual_but_sound_is_taken(params: dict[str, object]) -> None:
    SamplingParams(**params)  # type: ignore[arg-type]


FULL = SamplingParams(
    logit_bias={9: 1, 3: -2.5},
    allowed_token_ids=[9, 3, 4, 4],
    banned_token_ids=[4],
    stop_regex="a+b",
    n=2,
    prompt_logprobs=3,
)
CONSTRAINED = SamplingParams(constraint=DIGITS)


def test_parameters_are_values_that_can_be_compared_hashed_and_changed_by_replacing() -> None:
    same = replace(FULL)
    assert same == FULL
    assert hash(same) == hash(FULL)
    assert replace(FULL, n=3) != FULL
    assert hash(replace(CONSTRAINED)) == hash(CONSTRAINED)
    assert replace(CONSTRAINED, constraint=ConstraintSpec.regex("[0-9]")) != CONSTRAINED
    assert FULL.logit_bias == ((3, -2.5), (9, 1.0))
    assert replace(FULL, logit_bias={9: 1.0, 3: -2.5}) == FULL


def test_changing_what_was_given_does_not_change_the_parameters() -> None:
    bias, allowed = {1: 1.0}, [1, 2]
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed)  # type: ignore[arg-type]
    bias[1], allowed[0] = 5.0, 7
    assert params.logit_bias == ((1, 1.0),)
    assert params.allowed_token_ids == (1, 2)


def test_edits_of_tokens_are_made_once_as_arrays() -> None:
    edits = FULL.token_edits
    assert edits is not None
    assert edits.allowed is not None
    assert edits.allowed.tolist() == [3, 9]
    assert edits.banned.tolist() == []
    assert (edits.biased.tolist(), edits.biases.tolist()) == ([3, 9], [-2.5, 1.0])
    assert SamplingParams().token_edits is None
    assert FULL.compiled_stop_regexes[0].pattern == "a+b"


def test_reasoning_may_be_ended_at_once() -> None:
    assert SamplingParams(max_reasoning_tokens=0).max_reasoning_tokens == 0
