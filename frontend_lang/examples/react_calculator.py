"""An agent with a calculator: thought, action, observation, until it finishes (Yao et al. 2023).

Shows control flow that hangs on what the model wrote: `select` keeps the action to those there are,
stops cut the rest where a tool has to run, and a tool's failure is an observation like any other.
`pause` says how long the tool takes, so that the agent's prefix is kept warm meanwhile.
"""

import sapwood as sgl
from sapwood.frontend_lang.examples.calculator import CalculatorError, calculate
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.material import problems

CALCULATE, FINISH = "Calculate", "Finish"
INSTRUCTIONS = """\
Solve the problem in steps of Thought, Action and Observation. There are two actions:
Calculate[expression] works out an expression, Finish[number] ends with the answer.

Question: A box holds 12 eggs. How many eggs are in 7 boxes, if 5 of them broke?
Thought 1: I multiply the boxes by 12 and take away the broken eggs.
Action 1: Calculate[12 * 7 - 5]
Observation 1: 79
Thought 2: 79 eggs are left.
Action 2: Finish[79]

"""


@sgl.function
def react_calculator(
    s: sgl.ProgramState, question: str, max_steps: int = 4, tool_seconds: float = 0.1
) -> None:
    s += INSTRUCTIONS + "Question: " + question + "\n"
    for step in range(1, max_steps + 1):
        action, argument = f"action_{step}", f"argument_{step}"
        s += f"Thought {step}:" + sgl.gen(f"thought_{step}", stop="\n")
        s += f"\nAction {step}: " + sgl.select(action, [CALCULATE, FINISH])
        s += "[" + sgl.gen(argument, max_tokens=24, stop=["]", "\n"]) + sgl.pause(tool_seconds)
        s += "]\n"
        if s[action] == FINISH:
            s.set_var("answer", s[argument].strip())
            return
        s += f"Observation {step}: {observe(s[argument])}\n"
    s.set_var("answer", "")


def observe(expression: str) -> str:
    """What the agent is told of its calculation, also where it fails."""
    try:
        return f"{calculate(expression):.10g}"
    except CalculatorError as error:
        return f"Error: {error}."


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        for problem in problems()[:3]:
            state = react_calculator.run(
                problem.question, backend=backend, temperature=0, max_tokens=48
            )
            print(state.text().removeprefix(INSTRUCTIONS))
            print(f"answer: {state['answer']} (right: {problem.answer})\n")


if __name__ == "__main__":
    main()
