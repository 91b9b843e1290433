"""What is chosen, by which method, and how the choices are cut into tokens."""

import asyncio
import math
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sapwood as sgl
from sapwood import AsyncEngine, RequestError, SamplingParams
from sapwood.frontend_lang.backends.engine import EngineBackend
from sapwood.frontend_lang.backends.interface import Piece, Prompt
from sapwood.frontend_lang.choices import (
    ChoicesMethod,
    Selected,
    greedy_token_selection,
    select,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sapwood.runtime.hints import NO_HINTS
from tests.frontend_lang.fakes import BOS, FakeBackend

METHODS = (
    token_length_normalized,
    greedy_token_selection,
    unconditional_likelihood_normalized,
)
LOGPROBS = st.lists(
    st.lists(st.sampled_from([0.0, -0.5, -1.0, -2.0]), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


def names(logprobs: list[list[float]]) -> list[str]:
    return [f"choice {i}" for i in range(len(logprobs))]


def nothing(logprobs: list[list[float]]) -> list[tuple[int, ...]]:
    return [()] * len(logprobs)


@given(LOGPROBS)
def test_token_length_normalized_takes_the_first_of_the_highest_means(
    logprobs: list[list[float]],
) -> None:
    decision = token_length_normalized(names(logprobs), logprobs, nothing(logprobs))
    means = [np.mean(row) for row in logprobs]
    assert decision.index == int(np.argmax(means))
    assert decision.meta["normalized_prompt_logprobs"] == pytest.approx(means)


def test_probabilities_of_one_count() -> None:
    logprobs = [[0.0, -2.0], [-1.5]]
    decision = token_length_normalized(names(logprobs), logprobs, nothing(logprobs))
    assert decision.meta["normalized_prompt_logprobs"] == [-1.0, -1.5]
    assert decision.index == 0
    certain = token_length_normalized(["a"], [[0.0, 0.0]], [()])
    assert certain.meta["normalized_prompt_logprobs"] == [0.0]


@given(LOGPROBS)
def test_greedy_selection_drops_choices_column_by_column(logprobs: list[list[float]]) -> None:
    decision = greedy_token_selection(names(logprobs), logprobs, nothing(logprobs))
    width = max(map(len, logprobs))
    matrix = np.array(
        [[*row, *[math.fsum(row) / len(row)] * (width - len(row))] for row in logprobs]
    )
    left = np.arange(len(matrix))
    for column in range(width):
        best = matrix[left, column].max()
        left = left[matrix[left, column] == best]
    assert decision.index == left[0]
    np.testing.assert_allclose(decision.meta["greedy_logprob_matrix"], matrix)


@given(LOGPROBS, st.randoms(use_true_random=False))
def test_unconditional_normalisation_takes_the_greatest_mean_gain(
    logprobs: list[list[float]], random: object
) -> None:
    alone = [[random.choice([-1.0, -3.0]) for _ in row[1:]] for row in logprobs]  # type: ignore[attr-defined]
    decision = unconditional_likelihood_normalized(
        names(logprobs), logprobs, nothing(logprobs), alone
    )
    gains = [np.mean(np.array(row) - [0.0, *a]) for row, a in zip(logprobs, alone, strict=True)]
    told = decision.meta["normalized_unconditional_prompt_logprobs"]
    assert told == pytest.approx(gains)
    assert told[decision.index] == max(told)


def test_meta_has_sglangs_names() -> None:
    ids = [(1, 2), (3,)]
    decision = unconditional_likelihood_normalized(
        ["a", "b"], [[-1.0, -2.0], [-0.5]], ids, [[-4.0], []]
    )
    assert decision.meta == {
        "normalized_prompt_logprobs": [-1.5, -0.5],
        "input_token_logprobs": [[(-1.0, 1, None), (-2.0, 2, None)], [(-0.5, 3, None)]],
        "output_token_logprobs": [[], []],
        "unconditional_token_logprobs": [[(None, 1, None), (-4.0, 2, None)], [(None, 3, None)]],
        "normalized_unconditional_prompt_logprobs": [0.5, -0.5],
    }


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ([], "no choices"),
        (["a", ""], "is empty"),
        (["a", "b", "a"], "'a' is given twice"),
        ("ab", "list of strings"),
        (["a", 1], "list of strings"),
    ],
)
def test_choices_that_cannot_be_chosen_among_are_refused(choices: list[str], match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        asyncio.run(select(FakeBackend(), Prompt(text=""), choices))
    assert caught.value.param == "choices"


def test_a_backend_of_messages_has_no_probabilities_of_texts_alone() -> None:
    backend = FakeBackend(chat_only=True, with_encoder=False)
    prompt = Prompt(text="Is it?")
    with pytest.raises(RequestError, match="takes messages only.*token_length_normalized"):
        asyncio.run(select(backend, prompt, ["a", "b"], unconditional_likelihood_normalized))
    assert not backend.asked
    chosen = asyncio.run(select(backend, prompt, ["not", "no"]))
    assert chosen.text == "no"


@pytest.mark.parametrize("method", METHODS)
def test_a_backend_without_an_encoder_scores_texts(method: ChoicesMethod) -> None:
    backend = FakeBackend(with_encoder=False, logprob=lambda text: -float(len(text)))
    chosen = asyncio.run(select(backend, Prompt(text="Is it?"), ["not", "no"], method))
    # A text adds nothing to what each has alone here, and the first of equals is taken.
    assert chosen.index == (0 if method.needs_unconditional else 1)
    assert chosen.token_ids is None
    asked = [(call.prompt.text, call.continuations) for call in backend.asked]
    unconditional = [("", ("not", "no"))] if method.needs_unconditional else []
    assert asked == [("Is it?", ("not", "no")), *unconditional]


def test_all_tokens_of_a_choice_count_also_those_that_all_of_them_have() -> None:
    backend = FakeBackend()
    prompt = Prompt(text="?", token_ids=())
    asyncio.run(select(backend, prompt, ["yes sir", "yes"], settled=(BOS,), pending=[Piece("?")]))
    [asked] = backend.asked
    assert asked.continuations == (tuple(b"yes sir"), tuple(b"yes"))
    assert asked.prompt.token_ids == (BOS, *b"?")


def test_what_the_choice_follows_comes_back_with_it() -> None:
    pending = [Piece("<a>", is_control=True), Piece("?")]
    chosen = asyncio.run(
        select(FakeBackend(), Prompt(text=""), ["yes", "n"], settled=(1, 2), pending=pending)
    )
    encoded = asyncio.run(FakeBackend().encoder.encode([*pending, Piece("n")], at_start=False))  # type: ignore[union-attr]
    assert (chosen.text, chosen.token_ids) == ("n", encoded)


# -- with an engine ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    made = AsyncEngine(str(tiny_model), num_kv_blocks=512, check_invariants=True)
    yield made
    made.close()


def encoded(engine: AsyncEngine, text: str) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text, add_special_tokens=False).tolist())


async def logprobs_of(engine: AsyncEngine, token_ids: tuple[int, ...]) -> list[float]:
    """Of all tokens of a text but the first."""
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [output] = await engine.generate(list(token_ids), sampling)
    return [entry.logprob for entry in output.prompt_logprobs[1:]]  # type: ignore[union-attr, index]


MERGING = [
    ("The quick brown", [" fox", "er", " dog"]),
    ("The quick brown ", ["fox", "dog", " "]),
    ("A tree maps pref", ["ixes", " to", "er"]),
    ("A block holds the", [" keys", "n", "se values"]),
    ("Numbers such as ", ["1", "22", "333 are"]),
]


@pytest.mark.parametrize(("before", "choices"), MERGING)
def test_choices_get_the_probabilities_of_the_joint_tokenisation(
    engine: AsyncEngine, before: str, choices: list[str]
) -> None:
    async def body() -> None:
        chosen = await select(
            EngineBackend(engine), Prompt(text=before), choices, pending=[Piece(before)]
        )
        told = chosen.meta["input_token_logprobs"]
        shared = []
        for choice, entries in zip(choices, told, strict=True):
            joint = encoded(engine, before + choice)
            assert joint[len(joint) - len(entries) :] == tuple(token for _, token, _ in entries)
            whole = await logprobs_of(engine, joint)
            expected = whole[len(whole) - len(entries) :]
            assert [logprob for logprob, _, _ in entries] == pytest.approx(expected, abs=1e-4)
            shared.append(sum(whole) - sum(expected))
        # What is left of each whole text is the same prompt.
        assert shared == pytest.approx([shared[0]] * len(shared), abs=1e-4)
        assert chosen.token_ids == encoded(engine, before + chosen.text)

    asyncio.run(body())


def test_a_choice_that_grows_together_with_the_text_before_it_is_told_apart(
    engine: AsyncEngine,
) -> None:
    """The tokens of the text alone are no beginning of those with the choice."""
    alone, joint = encoded(engine, "The quick brown "), encoded(engine, "The quick brown fox")
    assert joint[: len(alone)] != alone


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "choices"), MERGING)
def test_select_decides_as_brute_force_does(
    engine: AsyncEngine, method: ChoicesMethod, before: str, choices: list[str]
) -> None:
    async def body() -> None:
        chosen = await select(
            EngineBackend(engine), Prompt(text=before), choices, method, pending=[Piece(before)]
        )
        assert chosen.index == await _by_force(engine, method, before, choices)

    asyncio.run(body())


async def _by_force(
    engine: AsyncEngine, method: ChoicesMethod, before: str, choices: list[str]
) -> int:
    texts = [encoded(engine, before), *(encoded(engine, before + c) for c in choices)]
    columns = zip(*texts, strict=False)
    num_common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    rows, gains = [], []
    for joint in texts[1:]:
        row = (await logprobs_of(engine, joint))[num_common - 1 :]
        alone = await logprobs_of(engine, joint[num_common:]) if len(joint) > num_common + 1 else []
        rows.append(row)
        gains.append((sum(row) - sum(alone)) / len(row))
    if method is unconditional_likelihood_normalized:
        return int(np.argmax(gains))
    means = [float(np.mean(row)) for row in rows]
    if method is token_length_normalized:
        return int(np.argmax(means))
    width = max(map(len, rows))
    padded = [[*row, *[mean] * (width - len(row))] for row, mean in zip(rows, means, strict=True)]
    return padded.index(max(padded))


def test_after_generated_tokens_nothing_is_taken_apart(engine: AsyncEngine) -> None:
    async def body() -> Selected:
        settled = encoded(engine, "The quick brown ")
        return await select(EngineBackend(engine), Prompt(text=""), ["fox", "dog"], settled=settled)

    chosen = asyncio.run(body())
    assert chosen.token_ids == encoded(engine, chosen.text)


def test_at_the_start_of_a_text_select_says_what_is_missing(engine: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="append a text before select"):
        asyncio.run(select(EngineBackend(engine), Prompt(text=""), ["a", "b"]))


def test_choices_share_the_computation_of_what_is_before_them(engine: AsyncEngine) -> None:
    async def body() -> tuple[int, int]:
        await engine.flush_cache()
        before = engine.stats()
        pending = [Piece("A tree maps prefixes to blocks; a block holds the keys and values.")]
        choices = [f" {word} it" for word in ("so", "then", "over", "the", "does", "fox")]
        chosen = await select(EngineBackend(engine), Prompt(text=""), choices, pending=pending)
        num_computed = engine.stats().computed_tokens - before.computed_tokens
        texts = [encoded(engine, pending[0].text + choice) for choice in choices]
        distinct = {ids[: i + 1] for ids in texts for i in range(len(ids))}
        assert chosen.meta["prompt_tokens"] == sum(map(len, texts))
        return num_computed, len(distinct) + 2 * len(choices)

    num_computed, bound = asyncio.run(body())
    assert num_computed <= bound


def test_scores_from_the_second_token_on_where_nothing_is_before_them(engine: AsyncEngine) -> None:
    async def body() -> None:
        backend = EngineBackend(engine)
        ids = encoded(engine, "The quick brown fox")
        nothing = Prompt(text="", token_ids=())
        several, one = await backend.score(nothing, [ids, ids[:1]], NO_HINTS)
        assert several.logprobs == pytest.approx(await logprobs_of(engine, ids), abs=1e-4)
        assert one.logprobs == ()

    asyncio.run(body())


@pytest.mark.parametrize("method", ["greedy_token_selection", len, 3])
def test_what_is_no_method_is_refused_where_it_stands(method: Any) -> None:
    with pytest.raises(TypeError, match="choices_method is token_length_normalized"):
        sgl.select("x", ["a", "b"], choices_method=method)
    with pytest.raises(TypeError, match="choices_method is token_length_normalized"):
        sgl.gen("x", choices=["a", "b"], choices_method=method)
