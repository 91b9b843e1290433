"""What the sections of the check are, and what each is given. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from gpu.context import Context


class Scale(StrEnum):
    """How much of a section is run."""

    FULL = "full"  # the sizes that the figures are of
    REHEARSAL = "rehearsal"  # the same kernels and one short round: fills the compiler's cache
    DRY = "dry"  # tiny sizes in Triton's interpreter, without a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a section's table. `bar` says in words what must hold, `is_met` whether it
    does; both are None where nothing is asked."""

    name: str
    figures: dict[str, Any]
    bar: str | None = None
    is_met: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the check that runs by itself. `seconds` is the most it may take."""

    name: str
    question: str
    target: str  # module:function of a Context, which yields rows as they are measured
    seconds: int
    is_default: bool = True
    is_sharded: bool = False  # its cases are spread over several processes, unmeasured

    def load(self) -> Callable[[Context], Iterator[Row]]:
        module, function = self.target.split(":")
        loaded = getattr(importlib.import_module(module), function)
        return cast("Callable[[Context], Iterator[Row]]", loaded)


# In the order in which they run. The engine's is the last, and has all the time that is left.
SECTIONS = (
    Section(
        name="kernels",
        question="Does every kernel compute what float64 arithmetic says?",
        target="gpu.suite:kernels",
        seconds=150,
        is_sharded=True,
    ),
    Section(
        name="bandwidth",
        question="How fast does this card copy memory and multiply matrices?",
        target="gpu.ceilings:bandwidth",
        seconds=20,
    ),
    Section(
        name="decode",
        question="How near to the memory's rate does attention of single rows read its keys?",
        target="gpu.attention:decode",
        seconds=60,
    ),
    Section(
        name="prefill",
        question="How near to the rate of matrix products is attention over whole prompts?",
        target="gpu.attention:prefill",
        seconds=45,
    ),
    Section(
        name="tree",
        question="What does reading a shared prefix once bring over reading it for every row?",
        target="gpu.attention:tree",
        seconds=60,
    ),
    Section(
        name="equality",
        question="Are greedy tokens the same with CUDA graphs and overlap, and on the CPU?",
        target="gpu.equality:equality",
        seconds=60,
    ),
    Section(
        name="elementwise",
        question="How near to the memory's rate are the operations around attention?",
        target="gpu.operations:elementwise",
        seconds=40,
    ),
    Section(
        name="sampling",
        question="What does drawing a step's tokens take?",
        target="gpu.operations:sampling",
        seconds=30,
    ),
    Section(
        name="engine",
        question="How fast are whole engines of models' shapes?",
        target="gpu.engine:engine",
        seconds=330,
    ),
    Section(
        name="tune",
        question="Which tile shapes are fastest on this card?",
        target="gpu.tuned:tune",
        seconds=300,
        is_default=False,
    ),
)
SECTION_BY_NAME = {section.name: section for section in SECTIONS}
