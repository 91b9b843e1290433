"""What a program may say of its future, and what is refused."""

from typing import Any

import pytest

from sapwood.runtime.errors import RequestError
from sapwood.runtime.hints import MAX_COUNT, MAX_SECONDS, NO_HINTS, Hints


def test_no_hints_say_nothing() -> None:
    assert Hints() == NO_HINTS
    assert not NO_HINTS.more_follows and NO_HINTS.program_id is None


@pytest.mark.parametrize(
    "given",
    [
        {"program_id": "p" * 200},
        {"fork_size": 1, "fork_index": 0},
        {"fork_size": 8},
        {"more_follows": True, "idle_seconds": 0},
        {"more_follows": True, "idle_seconds": MAX_SECONDS},
        {"output_tokens": 0},
        {"output_tokens": MAX_COUNT},
    ],
)
def test_hints_within_their_ranges_are_taken(given: dict[str, Any]) -> None:
    assert Hints(**given) == Hints(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"program_id": ""}, "1 to 200 characters"),
        ({"program_id": "p" * 201}, "1 to 200 characters"),
        ({"program_id": 5}, "1 to 200 characters"),
        ({"fork_size": 0}, "fork_size must be a whole number from 1"),
        ({"fork_size": True}, "fork_size must be a whole number"),
        ({"fork_index": 0}, "needs a fork_size"),
        ({"fork_index": 2, "fork_size": 2}, "needs a fork_size above it"),
        ({"more_follows": 1}, "true or false"),
        ({"more_follows": True, "idle_seconds": -1}, "from 0 to 600"),
        ({"more_follows": True, "idle_seconds": float("nan")}, "from 0 to 600"),
        ({"more_follows": True, "idle_seconds": True}, "from 0 to 600"),
        ({"idle_seconds": 1}, "set more_follows too"),
        ({"output_tokens": -1}, "output_tokens must be a whole number from 0"),
        ({"output_tokens": 1.5}, "output_tokens must be a whole number"),
    ],
)
def test_a_hint_out_of_its_range_is_refused_with_its_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Hints(**given)
    assert caught.value.param == "hints"
