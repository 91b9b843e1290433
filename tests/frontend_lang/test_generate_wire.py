"""What servers answer at `/generate`, read: an answer, or an error that shows what came."""

from typing import Any

import pytest

from sapwood.frontend_lang.backends.generate_wire import SapwoodWire, SGLangWire, whole_answer
from sapwood.runtime.errors import EngineError

SGLANG = SGLangWire(None, takes_seeds=False)
ENDED = {"finish_reason": {"type": "stop"}}


def test_a_sound_answer_is_read() -> None:
    ours = {"text": "a", "meta_info": ENDED, "sapwood": {"text_ids": [1, 2], "reasoning": "r"}}
    answer = whole_answer(SapwoodWire(), ours)
    assert (answer.text, answer.token_ids, answer.reasoning) == ("a", (1, 2), "r")
    assert whole_answer(SGLANG, {"text": "a", "meta_info": ENDED}).token_ids is None


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        "text",
        {},
        {"text": "a"},
        {"text": "a", "meta_info": None},
        {"text": "a", "meta_info": ["stop"]},
        {"text": None, "meta_info": ENDED},
        {"text": 3, "meta_info": ENDED},
        {"text": "a", "meta_info": ENDED, "sapwood": None},
        {"text": "a", "meta_info": ENDED, "sapwood": {"text_ids": None}},
        {"text": "a", "meta_info": ENDED, "sapwood": {}},
    ],
)
def test_what_is_no_answer_is_shown(result: Any) -> None:
    with pytest.raises(EngineError, match="answered what is no answer: "):
        whole_answer(SapwoodWire(), result)
