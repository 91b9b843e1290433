"""Constraints for APIs whose one constrained answer is a JSON object that satisfies a schema.

What is no object is asked for as the only property of one, and taken out of the answer again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import EngineError, RequestError

PROPERTY = "answer"
_AT = f"#/properties/{PROPERTY}"
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat:
    """A schema to ask for, and how the program's text is got out of what answers it.

    `holds_text`: the property is the text itself, not JSON. `choices`: the texts of which it is
    one, empty if it is something else.
    """

    schema: Mapping[str, Any]
    is_wrapped: bool
    holds_text: bool = False
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: ConstraintSpec, *, api: str, has_patterns: bool) -> "JsonFormat":
        """`has_patterns`: the API keeps to a `pattern` of a string. Raises RequestError for a
        constraint that no schema says."""
        match spec.kind:
            case ConstraintKind.JSON_SCHEMA:
                return cls._of_schema(json.loads(spec.text), api)
            case ConstraintKind.CHOICE:
                return cls.of_choices(json.loads(spec.text))
            case ConstraintKind.REGEX if has_patterns:
                pattern = {"type": "string", "pattern": f"^(?:{spec.text})$"}
                return cls(schema=_wrapped(pattern), is_wrapped=True, holds_text=True)
        kind = "regular expression" if spec.kind is ConstraintKind.REGEX else "grammar"
        raise RequestError(
            f"{api} can be held to a JSON schema or to choices, not to a {kind}; give json_schema "
            "or choices, or use a backend that can: Engine, or RuntimeEndpoint with its server",
            param="constraint",
        )

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> "JsonFormat":
        """One of these texts."""
        schema = _wrapped({"type": "string", "enum": list(choices)})
        return cls(schema=schema, is_wrapped=True, holds_text=True, choices=tuple(choices))

    @classmethod
    def _of_schema(cls, schema: Any, api: str) -> "JsonFormat":
        if not isinstance(schema, dict) or not schema:
            raise RequestError(
                f"{api} needs a schema that says something, not {schema!r}", param="json_schema"
            )
        if schema.get("type") == "object":
            return cls(schema=schema, is_wrapped=False)
        inner = {key: _moved(value) for key, value in schema.items() if key not in _DEFINITIONS}
        definitions = {key: _moved(schema[key]) for key in _DEFINITIONS if key in schema}
        return cls(schema=_wrapped(inner) | definitions, is_wrapped=True)

    def text(self, content: str) -> str:
        """The program's text in an answer that ended by itself. Raises EngineError for one that
        does not satisfy what was asked, as where a server ignores it."""
        try:
            value = json.loads(content)
        except ValueError:
            raise _broken(content, "it is no JSON") from None
        if not self.is_wrapped:
            return content
        if not isinstance(value, dict) or PROPERTY not in value:
            raise _broken(content, f"it is no object with {PROPERTY!r}")
        inner = value[PROPERTY]
        if self.choices and inner not in self.choices:
            raise _broken(content, "it is none of the choices")
        if self.holds_text:
            return str(inner)
        return json.dumps(inner, ensure_ascii=False)


def _wrapped(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {PROPERTY: schema},
        "required": [PROPERTY],
        "additionalProperties": False,
    }


def _moved(node: Any) -> Any:
    """A part of a schema whose references into itself lead to where it is now."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _moved_reference(value) if key == "$ref" else _moved(value)
        for key, value in node.items()
    }


def _moved_reference(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("#"):
        return value
    if value.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)):
        return value  # they stay at the root
    return _AT + value[1:]


def _broken(content: str, why: str) -> EngineError:
    return EngineError(
        f"the answer {content[:200]!r} is not what the constraint asks for ({why}): it was cut by "
        "max_tokens, or the server ignores response_format"
    )
