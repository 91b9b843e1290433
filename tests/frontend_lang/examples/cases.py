"""Each example with short arguments, and the variables that a run of it leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sapwood.frontend_lang.examples.few_shot_qa import few_shot_qa
from sapwood.frontend_lang.examples.json_extraction import json_extraction
from sapwood.frontend_lang.examples.llm_judge import DIMENSIONS, ESSAY, llm_judge
from sapwood.frontend_lang.examples.material import passages, problems, puzzles
from sapwood.frontend_lang.examples.multi_chain_reasoning import multi_chain_reasoning
from sapwood.frontend_lang.examples.multi_turn_chat import QUESTIONS, multi_turn_chat
from sapwood.frontend_lang.examples.rag_over_passages import rag_over_passages, retrieve
from sapwood.frontend_lang.examples.react_calculator import react_calculator
from sapwood.frontend_lang.examples.self_consistency import self_consistency
from sapwood.frontend_lang.examples.skeleton_of_thought import skeleton_of_thought
from sapwood.frontend_lang.examples.tree_of_thought import tree_of_thought

_PROBLEM = problems()[1].question


@dataclass(frozen=True, slots=True)
class Case:
    """`variables`: by name the number of texts in it, 1 for a text that stands alone."""

    program: Any
    arguments: Mapping[str, Any]
    variables: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0, "max_tokens": 8})

    @property
    def name(self) -> str:
        name: str = self.program.__name__
        return name


CASES = (
    Case(few_shot_qa, {"question": _PROBLEM, "num_examples": 2}, {"answer": 1}),
    Case(
        multi_turn_chat,
        {"questions": QUESTIONS},
        {"answer_1": 1, "answer_2": 1, "answer_3": 1},
    ),
    Case(
        react_calculator,
        {"question": _PROBLEM, "max_steps": 2},
        {"thought_1": 1, "action_1": 1, "argument_1": 1, "answer": 1},
    ),
    Case(
        tree_of_thought,
        {"numbers": puzzles()[0], "num_branches": 2},
        {"steps": 1, "is_solved": 1},
    ),
    Case(
        skeleton_of_thought,
        {"question": "How do I plant a tree?"},
        {"point_1": 1, "point_3": 1, "expansion": 3, "answer": 1},
    ),
    Case(
        llm_judge,
        {"essay": ESSAY},
        {"judgment": len(DIMENSIONS), "score": len(DIMENSIONS), "verdict": 1},
    ),
    Case(json_extraction, {"passage": passages()[1].text}, {"subject": 1}),
    Case(
        multi_chain_reasoning,
        {"question": _PROBLEM, "num_chains": 2},
        {"chain": 2, "answer": 1},
    ),
    Case(
        rag_over_passages,
        {"question": QUESTIONS[0], "found": retrieve(QUESTIONS[0], passages(), 2)},
        {"answer": 1, "source": 1},
    ),
    Case(self_consistency, {"question": _PROBLEM, "num_answers": 3}, {"answers": 3, "vote": 1}),
)
