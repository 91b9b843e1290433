"""What the examples ask about; data/SOURCE.txt says where it is from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of GSM8K, with the steps of its solution and the number that is right."""

    question: str
    steps: str
    answer: str


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    text: str


def worked_problems() -> list[Problem]:
    """Problems to show how it is done."""
    return [Problem(**row) for row in _read("gsm8k.json")["examples"]]


def problems() -> list[Problem]:
    """Problems to ask."""
    return [Problem(**row) for row in _read("gsm8k.json")["questions"]]


def puzzles() -> list[Sequence[int]]:
    """Four numbers each, of which 24 is to be made."""
    return [tuple(numbers) for numbers in _read("game24.json")]


def passages() -> list[Passage]:
    """A few lines each on trees."""
    return [Passage(**row) for row in _read("passages.json")]


def _read(name: str) -> Any:
    return json.loads((_DATA / name).read_text(encoding="utf-8"))
