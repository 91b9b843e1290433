"""Reasoning is cut off the answer, the same whole and in pieces, and where the matcher cuts it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.runtime.answer_format import (
    AnswerFormat,
    AnswerParts,
    AnswerReader,
    ToolCallPiece,
    joined,
)
from sapwood.runtime.reasoning import (
    REASONING_TAGS,
    ReasoningCounter,
    ReasoningFormat,
    reasoning_start,
    reasoning_tags,
)
from sapwood.runtime.reasoning_block import Phase, ReasoningStart, ReasoningTags

OPEN, CLOSED, EITHER = ReasoningStart.OPEN, ReasoningStart.CLOSED, ReasoningStart.EITHER
THINK = REASONING_TAGS["think"]
QUOTED = ReasoningTags("◁think▷", "◁/think▷")  # not ASCII
STARTS = st.sampled_from(list(ReasoningStart))
PIECES = ["<think>", "</think>", "<", "</", "think", ">", "\n", "\n\n", "a", " ", "é", "</think"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
CUTS = st.lists(st.integers(0, 60), max_size=8)


def in_pieces(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def read(answer_format: AnswerFormat, pieces: Sequence[str]) -> AnswerParts:
    reader = answer_format.reader()
    told = [reader.feed(piece, finished=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    return joined(told)


def expected(text: str, start: ReasoningStart) -> AnswerParts:
    """By the definition, on the whole text."""
    opening = re.match("\n{0,2}<think>", text) if start is EITHER else None
    if start is CLOSED or (start is EITHER and opening is None):
        return AnswerParts(content=text)
    body = text[opening.end() :] if opening else text
    reasoning, closing, rest = body.partition("</think>")
    if not closing:
        return AnswerParts(reasoning=reasoning.lstrip("\n"))
    return AnswerParts(reasoning=reasoning.strip("\n"), content=re.sub("\\A\n{1,2}", "", rest))


@given(TEXTS, STARTS, CUTS)
def test_however_it_is_cut_the_parts_are_those_of_the_definition(
    text: str, start: ReasoningStart, cuts: list[int]
) -> None:
    answer_format = ReasoningFormat(tags=THINK, start=start)
    assert read(answer_format, in_pieces(text, cuts)) == expected(text, start)


@given(TEXTS, STARTS, CUTS)
def test_a_block_that_is_not_separated_stays_in_the_content_as_it_was_written(
    text: str, start: ReasoningStart, cuts: list[int]
) -> None:
    answer_format = ReasoningFormat(tags=THINK, start=start, separate=False)
    assert read(answer_format, in_pieces(text, cuts)) == AnswerParts(content=text)


@given(TEXTS, STARTS)
def test_the_reader_cuts_where_the_automaton_does(text: str, start: ReasoningStart) -> None:
    automaton, data = THINK.automaton, text.encode()
    content = automaton.content_of(automaton.start(start), data)
    parts = expected(text, start)
    phase = automaton.phase(automaton.run(automaton.start(start), data))
    assert (content is None) == (phase is Phase.REASONING)
    assert (content or b"").decode() == parts.content


def test_what_is_certain_is_told_at_once() -> None:
    reader = ReasoningFormat(tags=THINK, start=EITHER).reader()
    told = [
        ("\n<th", AnswerParts()),
        ("ink>", AnswerParts()),
        ("\nLet", AnswerParts(reasoning="Let")),
        (" me\n", AnswerParts(reasoning=" me")),
        ("\nsee </", AnswerParts(reasoning="\n\nsee ")),
        ("b>", AnswerParts(reasoning="</b>")),
        ("\n</think>\n", AnswerParts()),
        ("\nSo", AnswerParts(content="So")),
        (" it is.</think>", AnswerParts(content=" it is.</think>")),
    ]
    for piece, parts in told:
        assert reader.feed(piece, finished=False) == parts, piece
    assert reader.feed("", finished=True) == AnswerParts()


def test_an_answer_that_ends_in_its_reasoning_tells_all_of_it() -> None:
    reader = ReasoningFormat(tags=THINK, start=OPEN).reader()
    assert reader.feed("so\n</thi", finished=False) == AnswerParts(reasoning="so")
    assert reader.feed("", finished=True) == AnswerParts(reasoning="\n</thi")


def test_tags_may_be_other_than_ascii() -> None:
    text = "◁think▷◁/thin so◁/think▷it is"
    for cut in range(len(text)):
        parts = read(ReasoningFormat(tags=QUOTED, start=EITHER), in_pieces(text, [cut]))
        assert parts == AnswerParts(reasoning="◁/thin so", content="it is")


@dataclass(frozen=True)
class ShoutedCalls:
    """Upper-case letters are names of tools that are called with their place."""

    markers: tuple[str, ...] = ("[CALLS]",)

    def reader(self) -> AnswerReader:
        return ShoutedCallReader()


class ShoutedCallReader:
    def __init__(self) -> None:
        self.num_calls = 0

    def feed(self, text: str, *, finished: bool) -> AnswerParts:
        calls = []
        for letter in filter(str.isupper, text):
            arguments = f'{{"place":{self.num_calls}}}'
            call = ToolCallPiece(index=self.num_calls, id=letter, name=letter, arguments=arguments)
            calls.append(call)
            self.num_calls += 1
        plain = "".join(letter for letter in text if not letter.isupper())
        return AnswerParts(content=plain + "." * finished, tool_calls=tuple(calls))


@pytest.mark.parametrize("separate", [True, False])
def test_an_inner_reader_sees_what_follows_the_block_and_no_more(separate: bool) -> None:
    answer_format = ReasoningFormat(tags=THINK, start=OPEN, separate=separate, inner=ShoutedCalls())
    assert answer_format.markers == ("<think>", "</think>", "[CALLS]")
    text = "CALL it?\n</think>\n\nI do A and B"
    block, reasoning = ("", "CALL it?") if separate else ("CALL it?\n</think>\n\n", "")
    for cut in range(len(text)):
        parts = read(answer_format, in_pieces(text, [cut]))
        assert (parts.reasoning, parts.content) == (reasoning, f"{block} do  and ."), cut
        assert [call.name for call in parts.tool_calls] == ["I", "A", "B"]
        assert parts.tool_calls[2].arguments == '{"place":2}'


def test_joined_parts_have_one_piece_for_each_call() -> None:
    pieces = [
        AnswerParts(reasoning="a", content="b"),
        AnswerParts(tool_calls=(ToolCallPiece(index=0, id="x", name="f"),)),
        AnswerParts(content="c", tool_calls=(ToolCallPiece(index=0, arguments="{"),)),
        AnswerParts(
            tool_calls=(
                ToolCallPiece(index=0, arguments="}"),
                ToolCallPiece(index=1, id="y", name="g", arguments="{}"),
            )
        ),
    ]
    calls = (
        ToolCallPiece(index=0, id="x", name="f", arguments="{}"),
        ToolCallPiece(index=1, id="y", name="g", arguments="{}"),
    )
    assert joined(pieces) == AnswerParts(reasoning="a", content="bc", tool_calls=calls)
    assert joined([]) == AnswerParts()


@given(TEXTS, STARTS, st.lists(st.integers(1, 4), min_size=40, max_size=40))
def test_tokens_of_the_block_are_counted_and_no_others(
    text: str, start: ReasoningStart, lengths: list[int]
) -> None:
    """A token counts if some of its bytes are of the block, tags included."""
    data, tokens = text.encode(), []
    for length in lengths:
        tokens.append(data[:length])
        data = data[length:]
    tokens = [token for token in (*tokens, data) if token]
    counter = ReasoningCounter(THINK, start)
    num_counted = sum(map(counter.add, tokens))
    text = b"".join(tokens).decode()
    opening = re.match("\n{0,2}<think>", text) if start is EITHER else None
    if start is CLOSED or (start is EITHER and opening is None):
        assert num_counted == 0
        return
    begin = opening.end() if opening else 0
    place = text.find("</think>", begin)
    end = len(text) if place < 0 else place + len("</think>")
    num_bytes, num_expected = len(text[:end].encode()), 0
    for token in tokens:
        num_expected += num_bytes > 0
        num_bytes -= len(token)
    assert num_counted == num_expected


QWEN3 = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{%- endfor %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def test_tags_are_found_in_the_template_or_named() -> None:
    assert reasoning_tags(QWEN3) == THINK
    assert reasoning_tags("{{ messages[0].content }}") is None
    assert reasoning_tags(None) is None
    for name, tags in REASONING_TAGS.items():
        assert reasoning_tags("no tags", name) == tags
        assert reasoning_tags(f"{{{{ content.split('{tags.close}') }}}}") == tags
    assert reasoning_tags(QWEN3, "none") is None


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", EITHER),
        ("<|im_start|>assistant\n<think>\n", OPEN),
        ("<｜Assistant｜><think>", OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", CLOSED),
        ("<｜Assistant｜></think>", CLOSED),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", EITHER),
        ("<think>", OPEN),
        ("", EITHER),
    ],
)
def test_the_end_of_the_prompt_says_how_the_answer_starts(
    prompt: str, start: ReasoningStart
) -> None:
    assert reasoning_start(THINK, prompt) is start


@pytest.mark.parametrize(
    ("open_message", "start"),
    [
        ("<think>\nLet me", OPEN),
        ("\n<think>", OPEN),
        ("<think>so</think>", CLOSED),
        ("<think>so</think>\n\nIt", CLOSED),
        ("The answer", CLOSED),
        ("  ", EITHER),
    ],
)
def test_an_open_message_says_how_the_answer_goes_on(
    open_message: str, start: ReasoningStart
) -> None:
    prompt = "<|im_start|>assistant\n" + open_message
    assert reasoning_start(THINK, prompt, open_message) is start


@pytest.mark.parametrize("tag", ["", " ", "\n<think>", "x" * 101])
def test_a_tag_that_cannot_be_one_is_refused(tag: str) -> None:
    with pytest.raises(ValueError, match="is no tag"):
        ReasoningTags("<think>", tag)
