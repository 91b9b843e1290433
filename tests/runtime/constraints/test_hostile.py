"""Constraints made to take all time or memory: refused within bounds, and nobody else is harmed."""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sapwood.runtime.constraints.bounded_process import MEMORY_LIMIT
from sapwood.runtime.constraints.interface import ConstraintBackend, GrammarError, Vocabulary
from sapwood.runtime.constraints.outlines_core_backend import OutlinesCoreBackend
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.constraints.xgrammar_backend import XgrammarBackend
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import find_model

Backend = OutlinesCoreBackend | XgrammarBackend
BACKENDS = (OutlinesCoreBackend, XgrammarBackend)
HARMLESS = ConstraintSpec.regex("[0-9]{2}")


def nested(depth: int, *, of: str, kind: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {of: kind(schema)}
    return schema


def schema_text(schema: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text=schema)


ROWS: Mapping[str, ConstraintSpec] = MappingProxyType(
    {
        "dot_200": ConstraintSpec.regex(".{0,200}"),
        "automaton_of_2**18": ConstraintSpec.regex("[01]*1[01]{18}"),
        "automaton_of_2**14": ConstraintSpec.regex(".*a.{14}b"),
        "million_repeats": ConstraintSpec.regex("(([a-z]{1,1000}){1,1000})"),
        "a_100000": ConstraintSpec.regex("a{100000}"),
        "not_x_5000": ConstraintSpec.regex("[^x]{0,5000}"),
        "words": ConstraintSpec.choice([f"word {i * 7919 % 20011}" for i in range(10_000)]),
        "parentheses": ConstraintSpec.regex("(" * 5000 + "a" + ")" * 5000),
        "pattern_129": ConstraintSpec.json_schema({"type": "string", "pattern": "^[a-z ]{1,129}$"}),
        "pattern_5000": ConstraintSpec.json_schema({"type": "string", "pattern": "^[^a]{0,5000}$"}),
        "max_length": ConstraintSpec.json_schema({"type": "string", "maxLength": 100_000}),
        "items_5000": ConstraintSpec.json_schema(
            {"type": "array", "items": {"type": "integer"}, "minItems": 5000}
        ),
        "nest_3000": schema_text('{"properties":{"a":' * 3000 + "{}" + "}}" * 3000),
        "any_of_10": ConstraintSpec.json_schema(
            nested(10, of="anyOf", kind=lambda s: [s, {"type": "array", "items": s}])
        ),
        "any_of_16": ConstraintSpec.json_schema(
            nested(16, of="anyOf", kind=lambda s: [s, {"type": "array", "items": s}])
        ),
        "enum_10000": ConstraintSpec.json_schema({"enum": [f"value {i}" for i in range(10_000)]}),
        "optional_500": ConstraintSpec.json_schema(
            {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
        ),
        "anything": ConstraintSpec.json_schema({}),
        "self": schema_text('{"$ref": "#"}'),
        "tree": ConstraintSpec.json_schema(
            {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
        ),
    }
)
# What a backend cannot do within 0.3 s, with a vocabulary of a few hundred tokens.
QUICK_ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "outlines_core": ("automaton_of_2**18", "not_x_5000", "optional_500"),
        "xgrammar": ("pattern_5000",),
    }
)


class Watch:
    """The most memory that one process and its forks held, looked at every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self.peak = 0  # bytes
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, sum(map(resident_bytes, self._pids())))

    def _pids(self) -> list[int]:
        try:
            children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        except OSError:
            return []
        return [self._pid, *map(int, children.split())]


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@contextmanager
def opened(kind: type[Backend], vocabulary: Vocabulary) -> Iterator[Backend]:
    backend = kind(vocabulary)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("name", QUICK_ROWS)
def test_what_takes_too_long_is_refused_and_the_next_constraint_is_compiled(
    name: str, vocabulary: Vocabulary, backend_named: Callable[[str], ConstraintBackend]
) -> None:
    backend = backend_named(name)
    assert isinstance(backend, Backend)
    pid = backend.process_id
    for row in QUICK_ROWS[name]:
        with pytest.raises(GrammarError, match="longer than 0.3 s|of memory"):
            backend.compile(ROWS[row], deadline=0.3)
        matcher = backend.compile(HARMLESS, deadline=30.0).matcher()
        assert matcher.advance(vocabulary.encode("1")[0])
    assert backend.process_id == pid, "only forks were killed"


def test_a_closed_backend_refuses(vocabulary: Vocabulary) -> None:
    backend = OutlinesCoreBackend(vocabulary)
    backend.close()
    backend.close()
    with pytest.raises(GrammarError, match="closed"):
        backend.compile(HARMLESS, deadline=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.name)
def test_no_hostile_constraint_goes_beyond_its_bounds(kind: type[Backend], real_model: str) -> None:
    tokenizer = Tokenizer.from_folder(find_model(real_model))
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    with opened(kind, vocabulary) as backend:
        backend.compile(HARMLESS, deadline=30.0)
        assert backend.process_id is not None
        idle = resident_bytes(backend.process_id)
        own = resident_bytes(os.getpid())
        for name, spec in ROWS.items():
            started = time.perf_counter()
            with Watch(backend.process_id) as watch:
                try:
                    outcome = f"{backend.compile(spec, deadline=1.0).num_bytes:,} bytes"
                except GrammarError as error:
                    outcome = str(error)
            seconds = time.perf_counter() - started
            print(f"{kind.name:14} {name:20} {seconds:6.3f} s {watch.peak >> 20:5} MiB  {outcome}")
            assert watch.peak < 2 * idle + MEMORY_LIMIT + 2**28
            assert resident_bytes(os.getpid()) < own + 2**29
            assert backend.compile(HARMLESS, deadline=30.0)
