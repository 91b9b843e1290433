import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from workloads import (
    LETTERS,
    MMLU_SUBJECTS,
    NUM_SHOTS,
    Message,
    MmluQuestion,
    PromptStyle,
    WorkloadBuilder,
    mmlu_questions,
)

from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import find_model

COUNT = 20
STYLES = list(PromptStyle)
SYSTEM = "You are of help."


class FakeTokenizer:
    """Words with the space before them, and a word with the empty line before it, are one token."""

    PIECES = re.compile(r"<\|\w+\|>|\n\n\w+| ?\w+|\s|[^\w\s]")

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        pieces = ["<|begin|>"] * add_special_tokens + self.PIECES.findall(text)
        return [self._ids.setdefault(piece, len(self._ids)) for piece in pieces]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        rendered = [
            f"<|start|>{message['role']}\n{message['content']}<|end|>\n"
            for message in ({"role": "system", "content": SYSTEM}, *messages)
        ]
        return self.encode("".join(rendered) + "<|start|>assistant\n", add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = list(self._ids)
        return "".join(pieces[token_id] for token_id in token_ids)


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    return FakeTokenizer()


def shared_prefix(questions: Sequence[MmluQuestion]) -> list[int]:
    return list(os.path.commonprefix([list(question.prompt_ids) for question in questions]))


def messages_of(text: str) -> list[tuple[str, str]]:
    """(role, content) of each message that is closed; the rest must be an open answer."""
    *closed, opened = re.split(r"<\|end\|>\n", text)
    assert opened == "<|start|>assistant\n"
    turns = [message.removeprefix("<|start|>").split("\n", 1) for message in closed]
    return [(role, content) for role, content in turns]


def test_a_chat_asks_after_five_turns_answered_by_a_letter_alone(tokenizer: FakeTokenizer) -> None:
    for question in mmlu_questions(tokenizer, count=COUNT):
        (role, system), *turns = messages_of(tokenizer.decode(question.prompt_ids))
        assert (role, system) == ("system", SYSTEM)
        assert [role for role, _ in turns] == ["user", "assistant"] * NUM_SHOTS + ["user"]
        asked = [content for role, content in turns if role == "user"]
        answers = [content for role, content in turns if role == "assistant"]
        subject = question.subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        assert asked[0].startswith(head)
        assert not any("The following are" in content for content in asked[1:])
        assert all(content.endswith("\nAnswer:") for content in asked)
        assert all(answer in LETTERS for answer in answers)


def test_a_text_ends_where_the_letter_is_due(tokenizer: FakeTokenizer) -> None:
    for question in mmlu_questions(tokenizer, style=PromptStyle.TEXT, count=COUNT):
        text = tokenizer.decode(question.prompt_ids)
        assert text.startswith("The following are multiple choice questions")
        assert len(re.findall(r"\nAnswer: [A-D]\n\n", text)) == NUM_SHOTS
        assert text.endswith("\nAnswer:")


def test_both_styles_ask_the_same_questions_in_the_same_order(tokenizer: FakeTokenizer) -> None:
    chats, texts = (mmlu_questions(tokenizer, style=style, count=COUNT) for style in STYLES)
    assert len(chats) == len(texts) == COUNT
    for chat, text in zip(chats, texts, strict=True):
        _, asked = messages_of(tokenizer.decode(chat.prompt_ids))[-1]
        assert (chat.subject, chat.answer) == (text.subject, text.answer)
        assert tokenizer.decode(text.prompt_ids).endswith(f"\n\n{asked}")


@pytest.mark.parametrize("style", STYLES)
def test_prompts_of_a_subject_share_all_tokens_of_the_worked_questions(
    tokenizer: FakeTokenizer, style: PromptStyle
) -> None:
    questions = mmlu_questions(tokenizer, style=style, count=COUNT)
    behind_answer = {PromptStyle.CHAT: "<|end|>\n<|start|>user", PromptStyle.TEXT: "\n\n"}[style]
    for subject in MMLU_SUBJECTS:
        prefix = shared_prefix([one for one in questions if one.subject == subject])
        worked = re.findall(rf"[A-D]{re.escape(behind_answer)}", tokenizer.decode(prefix))
        assert len(worked) == NUM_SHOTS


@pytest.mark.parametrize("style", STYLES)
def test_letters_are_the_tokens_that_the_worked_questions_are_answered_with(
    tokenizer: FakeTokenizer, style: PromptStyle
) -> None:
    questions = mmlu_questions(tokenizer, style=style, count=COUNT)
    before_answer = {PromptStyle.CHAT: "<|start|>assistant\n", PromptStyle.TEXT: "Answer:"}[style]
    before = tuple(tokenizer.encode(before_answer, add_special_tokens=False))
    for question in questions:
        ids = question.prompt_ids
        ends = [end for end in range(len(ids)) if ids[end - len(before) : end] == before]
        assert len(ends) == NUM_SHOTS
        assert all(ids[end] in question.letter_ids for end in ends)
        assert ids[-len(before) :] == before
        assert [tokenizer.decode([i]).strip() for i in question.letter_ids] == list(LETTERS)


@pytest.mark.parametrize("style", STYLES)
def test_another_set_asks_the_same_below_other_tokens(
    tokenizer: FakeTokenizer, style: PromptStyle
) -> None:
    sets = [
        mmlu_questions(tokenizer, style=style, count=COUNT, set_number=number)
        for number in (0, 1, 2)
    ]
    for same in zip(*sets, strict=True):
        assert len({(one.subject, one.answer) for one in same}) == 1
        cold, first, second = (tokenizer.decode(one.prompt_ids) for one in same)
        assert first == cold.replace("The following are", "Set 1. The following are", 1)
        assert second == first.replace("Set 1.", "Set 2.", 1)
    in_common = tokenizer.decode(
        shared_prefix([one for questions in sets[1:] for one in questions])
    )
    opening = {PromptStyle.CHAT: f"<|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n"}
    assert in_common == opening.get(style, "") + "Set"


def test_workload_m_asks_chats_for_one_token(tokenizer: FakeTokenizer) -> None:
    builder = WorkloadBuilder(tokenizer, scale=0.1)
    job = builder.build("m", 3)
    chats = mmlu_questions(tokenizer, style=PromptStyle.CHAT, count=10, set_number=3)
    assert builder.mmlu(3) == chats
    assert [request.prompt_ids for request in job.requests] == [chat.prompt_ids for chat in chats]
    assert {request.max_tokens for request in job.requests} == {1}


def test_letters_of_several_tokens_are_refused(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    assert len(mmlu_questions(tokenizer, style=PromptStyle.CHAT, count=3)) == 3
    with pytest.raises(ValueError, match="' A' takes 2 tokens"):
        mmlu_questions(tokenizer, style=PromptStyle.TEXT, count=3)


def test_more_questions_than_there_are_is_refused(tokenizer: FakeTokenizer) -> None:
    with pytest.raises(ValueError, match="ask for fewer questions"):
        mmlu_questions(tokenizer, count=1000)


@pytest.mark.real_model
def test_smollm2_shares_the_worked_turns_and_keeps_its_system_message(real_model: str) -> None:
    tokenizer = Tokenizer.from_folder(find_model(real_model))
    questions = mmlu_questions(tokenizer, count=COUNT)
    for subject in MMLU_SUBJECTS:
        prefix = shared_prefix([one for one in questions if one.subject == subject])
        text = tokenizer.decode(prefix, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert len(re.findall(r"assistant\n[A-D]<\|im_end\|>\n<\|im_start\|>", text)) == NUM_SHOTS
    opening = tokenizer.encode("<|im_start|>assistant\n").tolist()
    assert {one.prompt_ids[-len(opening) :] for one in questions} == {tuple(opening)}
