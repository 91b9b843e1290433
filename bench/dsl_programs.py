"""The work of bench/dsl.py, twice: as programs, and as plain chat calls with the same messages.

Both sides send the same conversations with the same seeds and get answers of the same length
(`min_tokens` is `max_tokens`, so no answer ends early). The plain side is what a client of any
OpenAI-compatible server writes with asyncio: all calls that can run at once do, and each sends its
whole conversation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

import sapwood as sgl
from sapwood.frontend_lang.examples.self_consistency import vote
from sapwood.frontend_lang.nodes import Gen

Message = dict[str, str]
STAGES = (
    "Write a plan for a review of this text.",
    "Carry the plan out.",
    "Reflect on the review. What may be wrong with it?",
    "Write the final review.",
)
NUM_BRANCHES = 2  # in each stage: 2 + 4 + 8 + 16 answers of a tree
DIMENSIONS = ("clarity", "originality", "evidence", "structure", "style", "relevance")
NUM_CHAINS = 8
REASON = "What is this text for? Think step by step."
CONCLUDE = "So what is it, in a word or two?"
CONCLUSION_LEN = 4  # tokens
TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Plain calls of /v1/chat/completions."""

    http: httpx.AsyncClient
    num_tokens: int  # of each answer

    async def answer(
        self, messages: Sequence[Message], seed: int, num_tokens: int | None = None
    ) -> str:
        """Raises httpx.HTTPStatusError where the server refuses."""
        num_tokens = num_tokens or self.num_tokens
        body = {
            "messages": list(messages),
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "temperature": TEMPERATURE,
            "seed": seed,
        }
        response = await self.http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        content: str = response.json()["choices"][0]["message"]["content"]
        return content


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work: a program of one text, and the plain coroutine that does the same."""

    name: str
    program: Any  # a function of sgl.function, of `text` and `num_tokens`
    plain: Callable[[ChatClient, str], Awaitable[None]]
    num_answers: int  # of one program


def gen(name: str, num_tokens: int, seed: int) -> Gen[str]:
    """An answer like `ChatClient.answer`'s."""
    return sgl.gen(
        name, max_tokens=num_tokens, min_tokens=num_tokens, temperature=TEMPERATURE, seed=seed
    )


# -- tree of thought ---------------------------------------------------------------------------


@sgl.function
def tree_program(s: sgl.ProgramState, text: str, num_tokens: int) -> None:
    s += sgl.user(text + "\n" + STAGES[0])
    for leaf in list(grown(s, 0, num_tokens)):
        leaf.sync()


def grown(s: sgl.ProgramState, stage: int, num_tokens: int) -> Iterator[sgl.ProgramState]:
    """The leaves of a tree whose root is about to answer `stage`; nothing waits."""
    for seed, branch in enumerate(s.fork(NUM_BRANCHES)):
        branch += sgl.assistant(gen(f"stage_{stage}", num_tokens, seed))
        if stage + 1 == len(STAGES):
            yield branch
        else:
            branch += sgl.user(STAGES[stage + 1])
            yield from grown(branch, stage + 1, num_tokens)


async def tree_plain(client: ChatClient, text: str) -> None:
    await _grow_plain(client, [_user(f"{text}\n{STAGES[0]}")], 0)


async def _grow_plain(client: ChatClient, messages: Sequence[Message], stage: int) -> None:
    async def branch(seed: int) -> None:
        answer = await client.answer(messages, seed)
        if stage + 1 < len(STAGES):
            asked = [*messages, _assistant(answer), _user(STAGES[stage + 1])]
            await _grow_plain(client, asked, stage + 1)

    await asyncio.gather(*map(branch, range(NUM_BRANCHES)))


# -- judge -------------------------------------------------------------------------------------


@sgl.function
def judge_program(s: sgl.ProgramState, text: str, num_tokens: int) -> None:
    s += sgl.user_begin() + text + "\n"
    branches = s.fork(len(DIMENSIONS))
    for seed, (branch, dimension) in enumerate(zip(branches, DIMENSIONS, strict=True)):
        branch += judge_question(dimension) + sgl.user_end()
        branch += sgl.assistant(gen("judgment", num_tokens, seed))
    branches.join()
    s += verdict_question(s["judgment"]) + sgl.user_end()
    s += sgl.assistant(gen("verdict", num_tokens, 0))


async def judge_plain(client: ChatClient, text: str) -> None:
    judgments = await asyncio.gather(
        *(
            client.answer([_user(f"{text}\n{judge_question(dimension)}")], seed)
            for seed, dimension in enumerate(DIMENSIONS)
        )
    )
    await client.answer([_user(f"{text}\n{verdict_question(judgments)}")], 0)


def judge_question(dimension: str) -> str:
    return f"Judge the {dimension} of this text in one sentence."


def verdict_question(judgments: Sequence[str]) -> str:
    lines = (f"{name}: {text}" for name, text in zip(DIMENSIONS, judgments, strict=True))
    return "Sum these judgments up.\n" + "\n".join(lines)


# -- self-consistency --------------------------------------------------------------------------


@sgl.function
def chains_program(s: sgl.ProgramState, text: str, num_tokens: int) -> None:
    s += sgl.user(f"{text}\n{REASON}")
    chains = s.fork(NUM_CHAINS)
    for seed, chain in enumerate(chains):
        chain += sgl.assistant(gen("chain", num_tokens, seed))
        chain += sgl.user(CONCLUDE) + sgl.assistant(gen("answer", CONCLUSION_LEN, seed))
    chains.join()
    s.set_var("vote", vote(s["answer"]))


async def chains_plain(client: ChatClient, text: str) -> None:
    asked = [_user(f"{text}\n{REASON}")]

    async def chain(seed: int) -> str:
        reasons = await client.answer(asked, seed)
        concluding = [*asked, _assistant(reasons), _user(CONCLUDE)]
        return await client.answer(concluding, seed, CONCLUSION_LEN)

    vote(await asyncio.gather(*map(chain, range(NUM_CHAINS))))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


TREE = Work(
    "tree of thought",
    tree_program,
    tree_plain,
    sum(NUM_BRANCHES**stage for stage in range(1, len(STAGES) + 1)),
)
JUDGE = Work("judge", judge_program, judge_plain, len(DIMENSIONS) + 1)
CHAINS = Work("self-consistency", chains_program, chains_plain, 2 * NUM_CHAINS)
