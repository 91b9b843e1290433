"""Automata over tokens, and masks of tokens."""

import numpy as np
import pytest

from sapwood.runtime.constraints import token_automaton
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.mask_bits import has_token, mask_of, only_token
from sapwood.runtime.constraints.token_automaton import TokenAutomaton, explore

# From 10, token 5 leads to the final 11, token 3 to 12, whence only 12 is reached.
TRANSITIONS = {10: {5: 11, 3: 12}, 11: {}, 12: {4: 12}}


def automaton(transitions: dict[int, dict[int, int]], *finals: int) -> TokenAutomaton:
    return explore(
        10,
        lambda state: list(transitions[state]),
        lambda state, token: transitions[state][token],
        lambda state: state in finals,
    )


def test_what_leads_to_no_end_is_left_out() -> None:
    found = automaton(TRANSITIONS, 11)
    assert found.tokens_of(0).tolist() == [5]
    after = found.step(0, 5)
    assert after is not None and found.is_final[after]
    assert found.step(0, 3) is None
    assert found.step(0, 6) is None


def test_an_automaton_that_accepts_nothing_is_refused() -> None:
    with pytest.raises(GrammarError, match="no answer"):
        automaton(TRANSITIONS)


def test_an_automaton_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton(TRANSITIONS, 11, 12)
    monkeypatch.setattr(token_automaton, "MAX_TRANSITIONS", 2)
    with pytest.raises(GrammarError, match="2 transitions"):
        automaton(TRANSITIONS, 11, 12)


def test_an_automaton_travels_as_bytes() -> None:
    found = automaton(TRANSITIONS, 11, 12)
    other = TokenAutomaton.from_bytes(found.to_bytes())
    assert other.num_bytes == found.num_bytes
    for field in ("starts", "token_ids", "next_states", "is_final"):
        first, second = getattr(found, field), getattr(other, field)
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("token", [0, 31, 32, 63, 95])
def test_a_mask_has_its_tokens_and_no_others(token: int) -> None:
    mask = mask_of([token], 3)
    assert [i for i in range(96) if has_token(mask, i)] == [token]
    assert only_token(mask) == token
    assert only_token(mask_of([token, (token + 40) % 96], 3)) is None
    assert only_token(mask_of([token, token ^ 1], 3)) is None


def test_an_empty_mask_has_no_only_token_and_nothing_is_outside_a_mask() -> None:
    assert only_token(mask_of([], 3)) is None
    full = mask_of(range(96), 3)
    assert not has_token(full, -1)
    assert not has_token(full, 96)
