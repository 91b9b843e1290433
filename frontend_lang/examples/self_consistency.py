"""Self-consistency (Wang et al. 2023): several answers to one prompt, and a vote.

Shows `gen(n=...)`: one request whose prompt is computed once, and a variable that is a list. The
seed makes every run print the same; SGLang's server heeds it with --enable-deterministic-inference.
"""

import re
from collections import Counter
from collections.abc import Iterable

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.material import problems, worked_problems


@sgl.function
def self_consistency(s: sgl.ProgramState, question: str, num_answers: int = 5) -> None:
    for problem in worked_problems()[:4]:
        s += f"Question: {problem.question}\n"
        s += f"Answer: {problem.steps} The answer is {problem.answer}.\n\n"
    s += "Question: " + question + "\nAnswer:"
    s += sgl.gen("answers", n=num_answers, temperature=0.7, stop="\n")
    s.set_var("vote", vote(map(final_number, s["answers"])))


def final_number(answer: str) -> str:
    """The last number of a text, empty where there is none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return numbers[-1].replace(",", "") if numbers else ""


def vote(numbers: Iterable[str]) -> str:
    """The commonest, the first of those that are equally common; empty where there is none."""
    counted = Counter(number for number in numbers if number)
    return counted.most_common(1)[0][0] if counted else ""


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        for problem in problems():
            state = self_consistency.run(problem.question, backend=backend, max_tokens=80, seed=0)
            numbers = ", ".join(final_number(answer) or "none" for answer in state["answers"])
            print(f"{problem.question}\n  {numbers}: {state['vote']} (right: {problem.answer})")


if __name__ == "__main__":
    main()
