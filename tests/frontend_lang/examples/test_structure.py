"""What each example asks, and what it makes of the answers: with scripted ones."""

import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from sapwood.frontend_lang.backends.interface import Call, Prompt
from sapwood.frontend_lang.examples.few_shot_qa import few_shot_qa
from sapwood.frontend_lang.examples.game24 import Numbers, moves, numbers_of
from sapwood.frontend_lang.examples.json_extraction import SUBJECT, Subject, json_extraction
from sapwood.frontend_lang.examples.llm_judge import DIMENSIONS, ESSAY, llm_judge
from sapwood.frontend_lang.examples.material import passages, worked_problems
from sapwood.frontend_lang.examples.multi_chain_reasoning import multi_chain_reasoning
from sapwood.frontend_lang.examples.multi_turn_chat import QUESTIONS, multi_turn_chat
from sapwood.frontend_lang.examples.rag_over_passages import QUESTIONS as RAG_QUESTIONS
from sapwood.frontend_lang.examples.rag_over_passages import rag_over_passages, retrieve
from sapwood.frontend_lang.examples.react_calculator import (
    CALCULATE,
    FINISH,
    observe,
    react_calculator,
)
from sapwood.frontend_lang.examples.self_consistency import final_number, self_consistency, vote
from sapwood.frontend_lang.examples.skeleton_of_thought import skeleton_of_thought
from sapwood.frontend_lang.examples.tree_of_thought import VALUES, tree_of_thought
from tests.frontend_lang.examples.test_game24 import can_be_solved
from tests.frontend_lang.fakes import Asked, FakeBackend


def generated(backend: FakeBackend) -> list[Asked]:
    return [asked for asked in backend.asked if asked.verb != "score"]


def hints_of(asked: Asked) -> Any:
    assert asked.call is not None
    return asked.call.hints


def test_few_shot_examples_are_common_to_all_questions() -> None:
    backend = FakeBackend(" 7")
    states = [
        few_shot_qa.run(question, num_examples=2, backend=backend)
        for question in ("Q one?", "Two?")
    ]
    assert [state["answer"] for state in states] == [" 7", " 7"]
    first, second = backend.prompts
    common = first[: first.index("Question: Q one?")]
    assert common.count("Answer:") == 2
    assert worked_problems()[1].question in common
    assert second == f"{common}Question: Two?\nAnswer:"


def test_each_turn_of_a_chat_continues_the_tokens_of_the_turn_before() -> None:
    backend = FakeBackend(["Oak.", "Ships.", "Both."])
    state = multi_turn_chat.run(QUESTIONS, backend=backend)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", *["user", "assistant"] * 3]
    prompts = [asked.prompt.token_ids for asked in backend.asked]
    for before, after, answer in zip(prompts, prompts[1:], ["Oak.", "Ships."], strict=False):
        assert before is not None
        assert after is not None
        settled = (*before, *answer.encode())
        assert after[: len(settled)] == settled


def agent(actions: Sequence[str], arguments: Sequence[str]) -> FakeBackend:
    """A backend that thinks, takes these actions and gives them these arguments."""
    remaining = list(actions)

    def script(prompt: Prompt, call: Call) -> str:
        if not prompt.text.endswith("["):
            return " Hm."
        *_, own = prompt.text.split("How many?")
        return arguments[own.count("Observation")]

    def logprob(choice: str) -> float:
        wanted = remaining[0]
        if choice.endswith(FINISH):  # the choice that is scored last
            remaining.pop(0)
        return 0.0 if choice.endswith(wanted) else -5.0

    return FakeBackend(script, logprob=logprob)


def test_an_agent_sees_what_its_calculator_says_and_ends_when_it_finishes() -> None:
    backend = agent([CALCULATE, CALCULATE, FINISH], ["6 * 7", "6 / 0", " 42 "])
    state = react_calculator.run("How many?", tool_seconds=0.5, backend=backend)
    assert state["answer"] == "42"
    assert f"Action 1: {CALCULATE}[6 * 7]\nObservation 1: 42\nThought 2: Hm.\n" in state.text()
    assert f"Observation 2: {observe('6 / 0')}\n" in state.text()
    assert "Observation 3" not in state.text()
    assert "thought_4" not in state
    idle = [hints_of(asked).idle_seconds for asked in generated(backend)]
    assert idle == [None, 0.5] * 3  # a thought, then what the tool is given


def test_an_agent_that_never_finishes_is_stopped() -> None:
    backend = agent([CALCULATE] * 2, ["1 + 1"] * 2)
    state = react_calculator.run("How many?", max_steps=2, backend=backend)
    assert state["answer"] == ""
    assert state["action_2"] == CALCULATE


def thinker(pick: Callable[[list[str]], str]) -> FakeBackend:
    """A backend that takes the step of those allowed that `pick` takes, and likes them all."""

    def script(prompt: Prompt, call: Call) -> str:
        assert call.constraint is not None
        allowed = [re.sub(r"\\(.)", r"\1", text) for text in call.constraint.text.split("|")]
        return pick(allowed)

    return FakeBackend(script)


def test_a_tree_of_thought_finds_a_solution_that_its_proposals_lead_to() -> None:
    def clever(allowed: list[str]) -> str:
        return next(step for step in allowed if can_be_solved(left_by(step)))

    state = tree_of_thought.run((4, 5, 6, 10), num_branches=2, num_kept=1, backend=thinker(clever))
    assert state["is_solved"] == "True"
    assert len(state["steps"].splitlines()) == 3
    assert state["steps"].endswith("= 24 (left: 24)")


def test_a_tree_of_thought_proposes_in_branches_and_prunes_what_is_the_same() -> None:
    backend = thinker(lambda allowed: allowed[0])
    state = tree_of_thought.run((1, 2, 3, 4), num_branches=3, num_kept=2, backend=backend)
    assert state["is_solved"] == "False"
    proposals = generated(backend)
    assert len(proposals) == 3 * 3  # all branches agree, so one thought is kept at each level
    assert sorted(hints_of(asked).fork_index for asked in proposals[:3]) == [0, 1, 2]
    assert {hints_of(asked).fork_size for asked in proposals[:3]} == {3}
    scored = [asked for asked in backend.asked if asked.verb == "score"]
    assert [len(asked.continuations) for asked in scored] == [len(VALUES)] * 2
    assert all(asked.prompt.text not in state.text() for asked in scored)  # tried aside


def left_by(step: str) -> Numbers:
    """What a written step leaves."""
    numbers = step.partition("(left: ")[2].removesuffix(")").split()
    return tuple(sorted(map(Fraction, numbers)))


def test_every_proposal_allowed_is_a_move_of_the_rules() -> None:
    seen: list[list[str]] = []

    def note(allowed: list[str]) -> str:
        seen.append(allowed)
        return allowed[-1]

    tree_of_thought.run((4, 5, 6, 10), num_branches=1, num_kept=1, backend=thinker(note))
    assert sorted(seen[0]) == sorted(moves(numbers_of((4, 5, 6, 10))))
    assert [len(step.split("(left: ")[1].split()) for (step, *_) in seen] == [3, 2, 1]


def test_the_points_of_a_skeleton_are_expanded_side_by_side() -> None:
    def script(prompt: Prompt, call: Call) -> str:
        found = re.search(r"on point (\d)", prompt.text)
        return f"Text {found[1]}." if found else " point"

    backend = FakeBackend(script)
    state = skeleton_of_thought.run("How?", backend=backend)
    assert state["expansion"] == ["Text 1.", "Text 2.", "Text 3."]
    assert state["answer"] == "point\nText 1.\n\npoint\nText 2.\n\npoint\nText 3."
    expansions = generated(backend)[3:]
    assert sorted(hints_of(asked).fork_index for asked in expansions) == [0, 1, 2]
    [common] = {asked.prompt.text.partition("Write one")[0] for asked in expansions}
    assert "1. point\n2. point\n3. point\n" in common


def test_a_judge_branches_solves_and_merges() -> None:
    def script(prompt: Prompt, call: Call) -> str:
        found = re.search(r"Judge its (\w+)", prompt.text)
        return f"The {found[1]} is good." if found else "Well done."

    backend = FakeBackend(script, logprob=lambda choice: 0.0 if choice.endswith("4") else -1.0)
    state = llm_judge.run(ESSAY, backend=backend)
    assert state["judgment"] == [f"The {dimension} is good." for dimension in DIMENSIONS]
    assert state["score"] == ["4"] * len(DIMENSIONS)
    assert state["verdict"] == "Well done."
    messages = state.messages()
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    for dimension in DIMENSIONS:
        assert f"- {dimension} (4 of 5): The {dimension} is good.\n" in messages[1]["content"]
    branches = generated(backend)[: len(DIMENSIONS)]
    assert all(
        [m["role"] for m in b.prompt.messages][1:] == ["user", "assistant"] for b in branches
    )
    assert {hints_of(asked).fork_size for asked in branches} == {len(DIMENSIONS)}


def test_an_extraction_is_an_object_of_its_class() -> None:
    answer = {"kind": "tree", "name": "birch", "sheds_leaves": None}
    backend = FakeBackend(json.dumps(answer))
    state = json_extraction.run(passages()[1].text, backend=backend)
    assert state.get(SUBJECT) == Subject(kind="tree", name="birch", sheds_leaves=None)
    [asked] = backend.asked
    assert asked.call is not None
    assert asked.call.constraint is not None
    assert "sheds_leaves" in json.loads(asked.call.constraint.text)["properties"]


def test_all_chains_stand_before_the_answer() -> None:
    def script(prompt: Prompt, call: Call) -> str:
        return f" way {call.hints.fork_index}" if call.hints.fork_index is not None else "9"

    backend = FakeBackend(script)
    state = multi_chain_reasoning.run("How many?", backend=backend)
    assert state["answer"] == "9"
    ending = "Question: How many?\nSteps: way 0\nSteps: way 1\nSteps: way 2\nThe answer is 9"
    assert state.text().endswith(ending)
    assert len(generated(backend)) == 4


@pytest.mark.parametrize(
    ("question", "title"),
    [
        (RAG_QUESTIONS[0], "Coast redwood"),
        (RAG_QUESTIONS[1], "Coast redwood"),
        (RAG_QUESTIONS[2], "Grafting"),
        (RAG_QUESTIONS[3], "European larch"),
    ],
)
def test_the_passage_that_answers_is_found(question: str, title: str) -> None:
    found = retrieve(question, passages())
    assert title in [passage.title for passage in found]
    order = [passages().index(passage) for passage in found]
    assert order == sorted(order)  # as in the collection, not by rank


def test_an_answer_from_passages_names_one_of_them() -> None:
    backend = FakeBackend(" Fog.", logprob=lambda text: 0.0 if "larch" in text else -9.0)
    found = [passages()[3], passages()[5]]
    state = rag_over_passages.run(RAG_QUESTIONS[1], found, backend=backend)
    assert state["answer"] == " Fog."
    assert state["source"] == "European larch"
    assert backend.prompts[0].index(found[0].text) < backend.prompts[0].index(found[1].text)


def test_a_vote_is_over_the_answers_of_one_request() -> None:
    backend = FakeBackend(" 2 + 3 = 5. The answer is 5.")
    state = self_consistency.run("How many?", num_answers=3, backend=backend)
    assert state["answers"] == [" 2 + 3 = 5. The answer is 5."] * 3
    assert state["vote"] == "5"
    [asked] = backend.asked
    assert asked.call is not None
    assert asked.call.options.get("n") == 3


@pytest.mark.parametrize(
    ("texts", "number"),
    [
        (["so 1,200", "is 1200.", "is 7"], "1200"),
        (["nothing", "none at all"], ""),
        (["1", "2"], "1"),
        (["-3.50 left", "of -3.50"], "-3.50"),
    ],
)
def test_the_commonest_final_number_wins(texts: list[str], number: str) -> None:
    assert vote(map(final_number, texts)) == number
