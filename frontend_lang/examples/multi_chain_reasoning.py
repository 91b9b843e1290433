"""Several chains of thought, and one answer from all of them (Yoran et al. 2023).

Shows `join("concate_and_append")`: what the branches wrote is appended to the parent, one branch
after the other, and the parent goes on from there.
"""

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.material import problems, worked_problems


@sgl.function
def multi_chain_reasoning(s: sgl.ProgramState, question: str, num_chains: int = 3) -> None:
    for problem in worked_problems()[:2]:
        s += f"Question: {problem.question}\nSteps: {problem.steps}\n"
        s += f"The answer is {problem.answer}.\n\n"
    s += "Question: " + question + "\n"

    chains = s.fork(num_chains)
    for chain in chains:
        chain += "Steps:" + sgl.gen("chain", temperature=0.8, stop="\n") + "\n"
    chains.join("concate_and_append")

    s += "The answer is " + sgl.gen("answer", regex=r"-?[0-9]{1,6}(\.[0-9]{1,2})?", max_tokens=12)


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        for problem in problems()[:3]:
            state = multi_chain_reasoning.run(problem.question, backend=backend, max_tokens=64)
            print(state.text()[state.text().index(problem.question) :])
            print(f"(right: {problem.answer})\n")


if __name__ == "__main__":
    main()
