"""Tree of thought on the game of 24 (Yao et al. 2023): propose, evaluate, prune, level by level.

Shows forks of forks that share all they have in common, and constraints that are made while the
program runs: a step is one that the rules allow, so the model decides between steps, and what
follows from its decision is appended without being drawn.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.game24 import (
    TARGET,
    Numbers,
    is_solved,
    moves,
    numbers_of,
    written,
)
from sapwood.frontend_lang.examples.material import puzzles

INSTRUCTIONS = f"""\
Use numbers and basic arithmetic operations (+ - * /) to obtain {TARGET}. Each step takes two of the
remaining numbers and puts their result in their place.

Input: 4 4 6 8
4 + 8 = 12 (left: 4 6 12)
6 - 4 = 2 (left: 2 12)
2 * 12 = 24 (left: 24)

"""
VALUES = ("impossible", "likely", "sure")  # the worst first


@dataclass(frozen=True, slots=True)
class Thought:
    """A state that has written some steps, and the numbers that these leave."""

    state: sgl.ProgramState
    steps: tuple[str, ...]
    left: Numbers


@sgl.function
def tree_of_thought(
    s: sgl.ProgramState, numbers: Sequence[int], num_branches: int = 3, num_kept: int = 2
) -> None:
    left = numbers_of(numbers)
    s += INSTRUCTIONS + f"Input: {written(left)}\n"
    kept = [Thought(s, (), left)]
    for _ in range(len(left) - 1):
        kept = prune(propose(kept, num_branches), num_kept)
    s.set_var("steps", "\n".join(kept[0].steps))
    s.set_var("is_solved", str(is_solved(kept[0].left)))


def propose(thoughts: Sequence[Thought], num_branches: int) -> list[Thought]:
    """Thoughts one step further, those that leave the same numbers once. All are drawn together."""
    drawn = []
    for thought in thoughts:
        possible = moves(thought.left)
        name = f"step_{len(thought.steps) + 1}"
        for seed, branch in enumerate(thought.state.fork(num_branches)):
            branch += (
                sgl.gen(name, regex=one_of(possible), max_tokens=40, temperature=0.8, seed=seed)
                + "\n"
            )
            drawn.append((thought, branch, name, possible))
    further: dict[Numbers, Thought] = {}
    for thought, branch, name, possible in drawn:
        step = branch[name]
        left = possible[step]
        further.setdefault(left, Thought(branch, (*thought.steps, step), left))
    return list(further.values())


def prune(thoughts: Sequence[Thought], num_kept: int) -> list[Thought]:
    """The best of them, best first. The model judges, until there is nothing but the result."""
    if len(thoughts[0].left) == 1:
        return sorted(thoughts, key=lambda thought: not is_solved(thought.left))[:num_kept]
    judges = [thought.state.copy() for thought in thoughts]
    for judge in judges:
        judge += f"Can {TARGET} be reached (impossible, likely or sure)? "
        judge += sgl.select("value", VALUES)
    values = [VALUES.index(judge["value"]) for judge in judges]
    best = sorted(range(len(thoughts)), key=lambda i: -values[i])
    return [thoughts[i] for i in best[:num_kept]]


def one_of(texts: Iterable[str]) -> str:
    """A regular expression of these texts."""
    return "|".join(map(re.escape, texts))


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        for numbers in puzzles()[:4]:
            state = tree_of_thought.run(numbers, backend=backend)
            print(f"{numbers}, solved: {state['is_solved']}\n{state['steps']}\n")


if __name__ == "__main__":
    main()
