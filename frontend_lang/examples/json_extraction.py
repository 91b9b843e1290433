"""Values from text: what a passage says, as an object of a class.

Shows `gen(output_type=...)`: the answer is JSON of that type by construction, and `state.get` gives
the object, typed as such.
"""

from typing import Literal

from pydantic import BaseModel, Field

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.material import passages


class Subject(BaseModel):
    """What a passage is about."""

    kind: Literal["tree", "method", "other"]
    name: str = Field(max_length=24)
    sheds_leaves: bool | None = Field(description="None where it is not said")


SUBJECT = sgl.gen("subject", output_type=Subject, max_tokens=64)


@sgl.function
def json_extraction(s: sgl.ProgramState, passage: str) -> None:
    s += sgl.system("You turn text into JSON with the fields kind, name and sheds_leaves.")
    s += sgl.user(passage)
    s += sgl.assistant(SUBJECT)


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        arguments = [{"passage": passage.text} for passage in passages()]
        for state in json_extraction.run_batch(arguments, backend=backend, temperature=0):
            subject = state.get(SUBJECT)
            print(f"{subject.name}: a {subject.kind}, sheds its leaves: {subject.sheds_leaves}")


if __name__ == "__main__":
    main()
