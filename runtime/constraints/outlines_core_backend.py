"""Constraints by outlines_core: regular languages, compiled into a table of all tokens.

It compiles with all work ahead and no limit of its own, so it does so in a process that can be
killed (`bounded_process.py`); what comes back is walked by an automaton of ours. Opt-in: for small
languages, or to have what a program had with outlines.
"""

import json
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager

from sapwood.runtime.constraints.bounded_process import BoundedProcess, WorkError
from sapwood.runtime.constraints.choices import read_choices
from sapwood.runtime.constraints.compile_errors import grammar_error, kind_refused, require
from sapwood.runtime.constraints.explicit_regex import without_anchors
from sapwood.runtime.constraints.interface import GrammarError, Vocabulary
from sapwood.runtime.constraints.messages import pack
from sapwood.runtime.constraints.outlines_core_schema import enforceable
from sapwood.runtime.constraints.regex_text import python_to_rust
from sapwood.runtime.constraints.schema_text import read_schema
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.constraints.token_automaton import AutomatonGrammar, TokenAutomaton
from sapwood.runtime.constraints.token_table import TokenTable
from sapwood.runtime.constraints.whitespace_pattern import json_whitespace

_KINDS = (ConstraintKind.REGEX, ConstraintKind.CHOICE, ConstraintKind.JSON_SCHEMA)
_BOUNDED = "[ ]?"  # each character more multiplies the states


class OutlinesCoreBackend:
    """A `ConstraintBackend` (see interface.py). Thread-safe."""

    name = "outlines_core"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Starts the process. Raises ModuleNotFoundError where the package is missing."""
        require("outlines_core")
        self._eos_token_ids = vocabulary.eos_token_ids
        self._mask_size = vocabulary.mask_size
        self._turn = threading.Lock()
        self._process = BoundedProcess(
            "sapwood.runtime.constraints.outlines_core_compile:make_task",
            TokenTable.of(vocabulary).to_bytes(),
        )
        try:
            self._process.wait_until_ready()
        except WorkError as error:
            self.close()
            raise grammar_error(error, self.name) from error

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        return self._turn

    def compile(self, spec: ConstraintSpec, *, deadline: float) -> AutomatonGrammar:
        request = pack(_request(spec))
        try:
            answer = self._process.run(request, deadline=deadline)
        except WorkError as error:
            raise grammar_error(error, self.name) from error
        return AutomatonGrammar(
            automaton=TokenAutomaton.from_bytes(answer.body),
            eos_token_ids=self._eos_token_ids,
            mask_size=self._mask_size,
        )

    @property
    def process_id(self) -> int | None:
        """Of the process that compiles, if it runs."""
        return self._process.pid

    def close(self) -> None:
        self._process.close()


def _request(spec: ConstraintSpec) -> Mapping[str, str]:
    """What `outlines_core_compile.py` reads."""
    match spec.kind:
        case ConstraintKind.REGEX:
            return {"regex": without_anchors(python_to_rust(spec.text))}
        case ConstraintKind.CHOICE:
            return {"regex": "|".join(map(_literal, read_choices(spec.text)))}
        case ConstraintKind.JSON_SCHEMA:
            schema = enforceable(read_schema(spec.text))
            text = json.dumps(schema, ensure_ascii=False)
            return {"schema": text, "whitespace_pattern": _whitespace_pattern(spec)}
    raise kind_refused(spec.kind, OutlinesCoreBackend.name, _KINDS)


def _literal(choice: str) -> str:
    return "".join(f"\\x{{{ord(character):X}}}" for character in choice)


def _whitespace_pattern(spec: ConstraintSpec) -> str:
    if spec.whitespace_pattern is not None:
        return json_whitespace(spec.whitespace_pattern)
    match spec.whitespace:
        case Whitespace.BOUNDED:
            return _BOUNDED
        case Whitespace.COMPACT:
            return ""
        case Whitespace.SPACED:
            raise GrammarError(
                "outlines_core has the same whitespace on both sides of a comma or colon, so it "
                "cannot write spaced JSON; ask for compact or bounded whitespace"
            )
