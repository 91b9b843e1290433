"""A user's program, for a type checker: what it reads has the types that it asked for."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, assert_type

from pydantic import BaseModel

import sapwood as sgl


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: int


person = sgl.gen("person", output_type=Person)
point = sgl.gen("point", max_tokens=16, output_type=Point)
number = sgl.gen("number", output_type=int)
also_number = sgl.gen("also_number", dtype=float)
by_name = sgl.gen("by_name", dtype="int")
text = sgl.gen("text", max_tokens=8, stop="\n", temperature=0)
chosen = sgl.select("chosen", ["yes", "no"])
either = sgl.gen("either", choices=["a", "b"])


@sgl.function
def program(s: sgl.ProgramState, question: str) -> None:
    s += sgl.system("Answer.") + sgl.user(question)
    s += "Person: " + person + point + number + also_number + by_name + text + chosen + either
    with s.user():
        s += "more"
    branches = s.fork(2)
    for branch in branches:
        assert_type(branch, sgl.ProgramState)
        branch += sgl.gen("tip")
    branches.join()


def read(state: sgl.ProgramState) -> None:
    assert_type(state.get(person), Person)
    assert_type(state.get(person).age, int)
    assert_type(state.get(point), Point)
    assert_type(state.get(number), int)
    assert_type(state.get(also_number), float)
    assert_type(state.get(by_name), Any)
    assert_type(state.get(text), str)
    assert_type(state.text(), str)


async def read_async(state: sgl.ProgramState) -> None:
    assert_type(await state.aget(person), Person)


def run() -> None:
    bound = program.bind(question="q").with_options(temperature=0)
    assert_type(bound, sgl.Program)
    assert_type(bound.run(max_new_tokens=4), sgl.ProgramState)
    items = [{"question": "q"}]
    assert_type(bound.run_batch(items), list[sgl.ProgramState])
    as_they_come = bound.run_batch(items, generator_style=True, on_error="return")
    assert_type(as_they_come, Generator[sgl.ProgramState])
    bound.trace().print_graph_dfs()


def mistakes() -> None:
    sgl.gen("x", temprature=0)  # type: ignore[call-overload]
    sgl.gen("x", max_tokens="many")  # type: ignore[call-overload]
    program.run_batch([], on_error="ignore")  # type: ignore[call-overload]
    _ = person + 1  # type: ignore[operator]
