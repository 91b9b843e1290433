"""Skeleton of thought (Ning et al. 2024): first the points, then all of them at once.

Shows `fork` and `join`: the branches continue the same skeleton, run side by side, and come back
as lists.
"""

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line

QUESTION = "How do I plant a young tree so that it survives its first summer?"


@sgl.function
def skeleton_of_thought(s: sgl.ProgramState, question: str, num_points: int = 3) -> None:
    s += sgl.user(
        question + f"\nGive a skeleton of the answer: {num_points} points of a few words each."
    )
    with s.assistant():
        for i in range(1, num_points + 1):
            s += f"{i}." + sgl.gen(f"point_{i}", max_tokens=16, stop="\n") + "\n"

    branches = s.fork(num_points)
    for i, branch in enumerate(branches, 1):
        branch += sgl.user(f"Write one or two sentences on point {i}, and on nothing else.")
        branch += sgl.assistant(sgl.gen("expansion"))
    branches.join()

    points = [s[f"point_{i}"].strip() for i in range(1, num_points + 1)]
    paragraphs = zip(points, s["expansion"], strict=True)
    s.set_var("answer", "\n\n".join(f"{point}\n{text.strip()}" for point, text in paragraphs))


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        state = skeleton_of_thought.run(QUESTION, backend=backend, temperature=0, max_tokens=64)
        print(state["answer"])


if __name__ == "__main__":
    main()
