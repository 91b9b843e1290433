"""A judge of essays in six dimensions: branch, solve, merge (Saha et al. 2024).

Shows a message that is open across a fork: the essay is in the common part, each branch ends the
message with a question of its own, and the parent ends it with what all branches found.
"""

from collections.abc import Sequence

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line

DIMENSIONS = (
    "clarity",
    "originality",
    "evidence",
    "structure",
    "style",
    "relevance",
)
SCORES = ("1", "2", "3", "4", "5")
ESSAY = (
    "Cities should plant trees before they build car parks. A street with trees is several degrees "
    "cooler in summer, its rain water drains more slowly, and people walk there who would drive "
    "elsewhere. A car park can be built in a month, a tree takes thirty years; what takes longest "
    "should begin first."
)


@sgl.function
def llm_judge(s: sgl.ProgramState, essay: str, dimensions: Sequence[str] = DIMENSIONS) -> None:
    s += sgl.system("You are a fair and exact judge of short essays.")
    s += sgl.user_begin() + "Essay:\n" + essay + "\n\n"

    branches = s.fork(len(dimensions))
    for branch, dimension in zip(branches, dimensions, strict=True):
        branch += f"Judge its {dimension} in one sentence, then give a score from 1 to 5."
        branch += sgl.user_end()
        branch += sgl.assistant(
            sgl.gen("judgment", stop="\n") + "\nScore: " + sgl.select("score", SCORES)
        )
    branches.join()

    s += "Judgments of it:\n"
    for dimension, judgment, score in zip(dimensions, s["judgment"], s["score"], strict=True):
        s += f"- {dimension} ({score} of 5): {judgment.strip()}\n"
    s += "\nPut them into one verdict." + sgl.user_end()
    s += sgl.assistant(sgl.gen("verdict"))


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        state = llm_judge.run(ESSAY, backend=backend, temperature=0, max_tokens=64)
        for dimension, score, judgment in zip(
            DIMENSIONS, state["score"], state["judgment"], strict=True
        ):
            print(f"{dimension}: {score} ({judgment.strip()})")
        print(f"\n{state['verdict']}")


if __name__ == "__main__":
    main()
