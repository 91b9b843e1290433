"""Tokens of a state: constants are encoded together and once, answers never."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import (
    Answer,
    Call,
    Piece,
    Prompt,
    RoleText,
    Score,
    TokenIds,
)
from sapwood.frontend_lang.state import ProgramState
from sapwood.frontend_lang.transcript import Transcript
from tests.frontend_lang.fakes import BOS, ByteEncoder, FakeBackend, spelled

AROUND = RoleText("<user>", "</user>")


def settled(transcript: Transcript, encoder: ByteEncoder) -> tuple[int, ...]:
    asyncio.run(transcript.settle(encoder))
    return transcript.token_ids


def test_constants_that_stand_together_are_encoded_together() -> None:
    encoder, transcript = ByteEncoder(), Transcript(has_tokens=True)
    transcript.add_constant("a")
    transcript.add_constant("b")
    transcript.begin_role("user", AROUND)
    assert settled(transcript, encoder)[0] == BOS
    assert encoder.encoded == [(Piece("a"), Piece("b"), Piece("<user>", is_control=True))]


def test_generated_tokens_enter_as_they_are() -> None:
    encoder, transcript = ByteEncoder(), Transcript(has_tokens=True)
    transcript.add_constant("a")
    transcript.add_generated("text", (1, 2))
    transcript.add_constant("b")
    assert settled(transcript, encoder) == (BOS, ord("a"), 1, 2, ord("b"))
    assert transcript.text == "atextb"
    assert encoder.encoded == [(Piece("a"),), (Piece("b"),)]


def test_a_branch_joins_its_constants_to_those_before_the_fork() -> None:
    encoder, transcript = ByteEncoder(), Transcript(has_tokens=True)
    transcript.add_constant("a")
    branch = transcript.copy()
    branch.add_constant("b")
    settled(branch, encoder)
    assert encoder.encoded == [(Piece("a"), Piece("b"))]
    assert transcript.text == "a"
    assert not transcript.token_ids


def test_an_answer_that_shares_a_token_with_a_constant_replaces_its_tokens() -> None:
    encoder, transcript = ByteEncoder(), Transcript(has_tokens=True)
    transcript.add_generated("x", (7,))
    transcript.add_constant(" ")
    asyncio.run(transcript.settle_generated(encoder))
    assert transcript.pending == (Piece(" "),)
    transcript.add_joint("yes", (99,))
    assert settled(transcript, encoder) == (7, 99)
    assert transcript.text == "x yes"
    assert encoder.encoded == []


def test_without_an_encoder_there_are_no_tokens() -> None:
    transcript = Transcript(has_tokens=False)
    transcript.add_constant("a")
    transcript.add_generated("b", None)
    asyncio.run(transcript.settle(None))
    assert transcript.prompt() == Prompt(text="ab")


CHANGES = st.lists(
    st.sampled_from("cgjr"), max_size=12
)  # constants, answers, joint answers, roles that begin and end


def apply(transcript: Transcript, kinds: list[str], encoder: ByteEncoder) -> None:
    for number, kind in enumerate(kinds):
        text = f"{kind}{number}"
        if kind == "c":
            transcript.add_constant(text)
        elif kind == "g":
            transcript.add_generated(text, tuple(text.encode()))
        elif kind == "j":
            asyncio.run(transcript.settle_generated(encoder))
            pending = asyncio.run(
                encoder.encode(transcript.pending, at_start=not transcript.token_ids)
            )
            transcript.add_joint(text, (*pending, *text.encode()))
        elif transcript.role is None:
            transcript.begin_role("user", AROUND)
        else:
            transcript.end_role("user")


@given(before=CHANGES, after=CHANGES)
def test_tokens_spell_the_text_and_what_is_repeated_says_the_same(
    before: list[str], after: list[str]
) -> None:
    encoder, transcript = ByteEncoder(), Transcript(has_tokens=True)
    apply(transcript, before, encoder)
    branch = transcript.copy()
    apply(branch, after, encoder)
    transcript.repeat(branch.changes)
    assert transcript.text == branch.text
    assert transcript.messages == branch.messages
    for each in (transcript, branch):
        assert spelled(settled(each, encoder)) == each.text


def test_every_prompt_continues_the_tokens_of_the_one_before() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += sgl.system("a")
        for turn in range(3):
            s += sgl.user(f"{turn}") + sgl.assistant(sgl.gen("x") + "," + sgl.gen("y"))

    backend = FakeBackend(lambda prompt, call: str(len(prompt.text)))
    program.run(backend=backend)
    prompts = [asked.prompt for asked in backend.asked]
    for before, after in zip(prompts, prompts[1:], strict=False):
        assert before.token_ids is not None
        assert after.token_ids is not None
        answer = str(len(before.text)).encode()
        assert after.token_ids[: len(before.token_ids) + len(answer)] == (
            *before.token_ids,
            *answer,
        )


class _Merging(ByteEncoder):
    """A tokenizer that has one token (999) for a space with a digit behind it."""

    async def encode(self, pieces: Any, *, at_start: bool) -> tuple[int, ...]:
        ids = list(await super().encode(pieces, at_start=at_start))
        merged: list[int] = []
        for token in ids:
            if merged and merged[-1] == ord(" ") and chr(token % 256).isdigit() and token < 256:
                merged[-1] = 900 + int(chr(token))
            else:
                merged.append(token)
        return tuple(merged)


class _Counting(FakeBackend):
    """Answers a number with the tokens of `_Merging`, and finds every choice as likely."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Merging()

    def _answer(self, prompt: Prompt, call: Call) -> Answer:
        assert prompt.token_ids is not None
        lacks_space = prompt.token_ids[-1] == ord(":")
        return Answer(
            text=" 7" if lacks_space else "7",
            token_ids=(907,) if lacks_space else (ord("7"),),
            finish_reason="stop",
        )

    def _score(self, prompt: Prompt, continuation: TokenIds | str) -> Score:
        return Score(logprobs=(0.0,) * len(continuation))


@pytest.mark.parametrize("stream", [False, True])
def test_a_constrained_answer_takes_the_space_before_it_into_its_token(stream: bool) -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "n: " + sgl.gen("n", regex="[0-9]") + "!" + sgl.gen("rest")

    backend = _Counting()
    state = program.run(backend=backend, stream=stream)
    assert state["n"] == "7"
    assert state.text() == "".join(state.text_iter()) == "n: 7!7"
    assert "".join(state.text_iter("n")) == "7"
    prompts = [asked.prompt.token_ids for asked in backend.asked]
    assert prompts == [(BOS, *b"n:"), (BOS, *b"n:", 907, ord("!"))]


def test_a_choice_takes_the_space_before_it_into_its_token() -> None:
    @sgl.function
    def program(s: ProgramState) -> None:
        s += "n: " + sgl.select("n", ["7", "word"]) + "!" + sgl.gen("rest")

    backend = _Counting()
    assert program.run(backend=backend)["n"] == "7"
    scored, generated = backend.asked
    assert scored.prompt.token_ids == (BOS, *b"n:")
    assert scored.continuations == ((907,), tuple(b" word"))
    assert generated.prompt.token_ids == (BOS, *b"n:", 907, ord("!"))
