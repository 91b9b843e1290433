"""Few-shot questions: worked examples, then the question.

Shows constants and one `gen`, and `run_batch`: the examples are the same for all questions, so they
are computed once, whatever the order of the questions.
"""

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.material import problems, worked_problems


@sgl.function
def few_shot_qa(s: sgl.ProgramState, question: str, num_examples: int = 5) -> None:
    for problem in worked_problems()[:num_examples]:
        s += f"Question: {problem.question}\n"
        s += f"Answer: {problem.steps} The answer is {problem.answer}.\n\n"
    s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", stop="\n")


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        arguments = [{"question": problem.question} for problem in problems()]
        states = few_shot_qa.run_batch(arguments, backend=backend, temperature=0, max_tokens=80)
        for problem, state in zip(problems(), states, strict=True):
            cached = state.get_meta_info("answer")["cached_tokens"]
            print(f"{problem.question}\n  {state['answer'].strip()}")
            print(f"  (right: {problem.answer}; {cached} tokens of the prompt were cached)")


if __name__ == "__main__":
    main()
