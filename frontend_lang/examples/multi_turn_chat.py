"""A conversation of several turns.

Shows roles: the model's own chat template is written around each message. The state keeps the
tokens of earlier answers as they were drawn, so a turn computes what is new and nothing else.
"""

from collections.abc import Sequence

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line

QUESTIONS = (
    "Which tree bears acorns?",
    "What is its wood used for?",
    "Put both answers into one short sentence.",
)


@sgl.function
def multi_turn_chat(s: sgl.ProgramState, questions: Sequence[str]) -> None:
    s += sgl.system("You are a gardener. Answer briefly.")
    for turn, question in enumerate(questions, 1):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{turn}"))


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        state = multi_turn_chat.run(QUESTIONS, backend=backend, temperature=0, max_tokens=80)
        for message in state.messages():
            print(f"{message['role']}: {message['content']}\n")
        for turn in range(1, len(QUESTIONS) + 1):
            told = state.get_meta_info(f"answer_{turn}")
            print(f"turn {turn}: {told['cached_tokens']} of {told['prompt_tokens']} tokens cached")


if __name__ == "__main__":
    main()
