"""What an answer must satisfy, as a value that can go over any wire.

Knows no engine that enforces it, no tokenizer and no tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class ConstraintKind(StrEnum):
    """What `ConstraintSpec.text` is."""

    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON; the order of properties is kept
    REGEX = "regex"  # the whole answer matches it
    CHOICE = "choice"  # a JSON list of strings, of which the answer is one
    LARK = "lark"  # a grammar in Lark's notation
    EBNF = "ebnf"  # a grammar in GBNF, the notation of llama.cpp
    STRUCTURAL_TAG = "structural_tag"  # text with constrained parts, as JSON


class Whitespace(StrEnum):
    """Where JSON may have whitespace between its tokens. Never without a bound."""

    BOUNDED = "bounded"  # a little, as the model likes
    COMPACT = "compact"  # none: {"a":1,"b":2}
    SPACED = "spaced"  # exactly one space after , and : as in json.dumps: {"a": 1, "b": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec:
    """One constraint. Equal specs mean the same language, and are compiled once.

    `whitespace` and `whitespace_pattern` (a regular expression that replaces it) are for the JSON
    in it. `backend` is a name of `sapwood.runtime.constraints.BACKENDS`; None: the engine's own.
    """

    kind: ConstraintKind
    text: str
    whitespace: Whitespace = Whitespace.BOUNDED
    whitespace_pattern: str | None = None
    backend: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ConstraintSpec":
        """The spec that `as_json` told."""
        kind, whitespace = ConstraintKind(value["kind"]), Whitespace(value["whitespace"])
        return cls(**{**value, "kind": kind, "whitespace": whitespace})

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool, *, whitespace: Whitespace = Whitespace.BOUNDED
    ) -> "ConstraintSpec":
        """A JSON value that satisfies a schema, which is open where it does not say otherwise."""
        text = json.dumps(schema, ensure_ascii=False)
        return cls(kind=ConstraintKind.JSON_SCHEMA, text=text, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "ConstraintSpec":
        """A text that matches `pattern`, in Python's notation, from its first to its last."""
        return cls(kind=ConstraintKind.REGEX, text=pattern)

    @classmethod
    def choice(cls, choices: list[str]) -> "ConstraintSpec":
        """One of these texts."""
        return cls(kind=ConstraintKind.CHOICE, text=json.dumps(choices, ensure_ascii=False))
