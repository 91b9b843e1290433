"""Both sides of bench/dsl.py do the same work, and its best possible is the best possible."""

import asyncio
import json
from typing import Any

import dsl
import httpx
import pytest
from dsl_backend import InstantBackend
from dsl_programs import CHAINS, JUDGE, TREE, ChatClient, Work

from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt

NUM_TOKENS = 3
Asked = tuple[str, int, int]  # messages as JSON, seed, tokens


class NotingBackend(InstantBackend):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        *messages, opened = prompt.messages
        assert dict(opened) == {"role": "assistant", "content": ""}
        self.asked.append(_asked([dict(message) for message in messages], call.options))
        return await super().generate(prompt, call)


def _asked(messages: list[dict[str, str]], options: Any) -> Asked:
    assert options["min_tokens"] == options["max_tokens"]
    return json.dumps(messages), options["seed"], options["max_tokens"]


def plain_calls(work: Work, text: str, answer: str) -> list[Asked]:
    asked = []

    def reply(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(_asked(body["messages"], body))
        return httpx.Response(200, json={"choices": [{"message": {"content": answer}}]})

    async def run() -> None:
        transport = httpx.MockTransport(reply)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await work.plain(ChatClient(http, NUM_TOKENS), text)

    asyncio.run(run())
    return asked


@pytest.mark.parametrize("work", [TREE, JUDGE, CHAINS], ids=lambda work: work.name)
def test_a_program_and_its_plain_calls_send_the_same_conversations(work: Work) -> None:
    backend = NotingBackend()
    work.program.run("A text.", NUM_TOKENS, backend=backend)
    assert len(backend.asked) == work.num_answers
    assert sorted(backend.asked) == sorted(plain_calls(work, "A text.", " an answer"))


@pytest.mark.parametrize(
    ("prompts", "num"),
    [
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 4]], 4),
        ([[1, 2, 4], [5], [1, 2, 3], [1, 2, 3]], 6),  # the last token again for the repeated one
        ([[1, 2, 3], [1, 2]], 3),  # the shorter one first
    ],
)
def test_what_must_be_computed_is_the_tree_and_the_last_token_of_each(
    prompts: list[list[int]], num: int
) -> None:
    assert dsl.num_necessary(prompts) == num


def test_a_batch_of_few_shot_programs_is_shuffled_and_its_groups_share_their_examples() -> None:
    batch = dsl.few_shot_arguments(40)
    examples = [row["examples"] for row in batch]
    assert len(set(examples)) == dsl.NUM_GROUPS
    assert examples != sorted(examples, key=examples.index)  # groups are not together
    assert not any(row["question"] in row["examples"] for row in batch)
