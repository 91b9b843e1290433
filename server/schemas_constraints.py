"""How requests say what an answer must satisfy: in the fields of OpenAI, vLLM and SGLang.

Whichever is used becomes one `ConstraintSpec`; two in a request are refused. What the text of a
constraint may be is checked by SamplingParams, which knows no fields: `GivenConstraint.path` is the
caller's word for "constraint" in its errors.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, to_json

from sapwood.runtime.constraints import BACKENDS
from sapwood.runtime.constraints.limits import WHITESPACE_KINDS
from sapwood.runtime.constraints.notation import grammar_spec
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.server.errors import ApiError
from sapwood.server.schemas import Accepted, Wire, in_callers_words, refused

_OPEN_OBJECTS = 'say "additionalProperties": false in the schema, and leave it out'
# vLLM's names for what we have, and for our own choice.
_BACKEND_BY_WORD: Mapping[str, str | None] = MappingProxyType(
    {
        **{name: name for name in BACKENDS},
        "guidance": "llguidance",
        "outlines": "outlines_core",
        "auto": None,
    }
)
_FIELDS_OF_TYPE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": (),
        "json_object": (),
        "json_schema": ("json_schema",),
        "structural_tag": ("format", "structures", "triggers"),
    }
)


@dataclass(frozen=True, slots=True)
class GivenConstraint:
    """A constraint and its place in the body."""

    path: str
    spec: ConstraintSpec


def only_constraint(given: Iterable[GivenConstraint]) -> GivenConstraint | None:
    """The one constraint of a request, if it has one. Raises ApiError for two."""
    first, second, *_ = (*given, None, None)
    if first is not None and second is not None:
        raise ApiError(
            400,
            f"{first.path} and {second.path} both constrain the answer; give one of them",
            param=second.path,
        )
    return first


# -- what fields hold ------------------------------------------------------------------------------


def _as_json_text(value: Any) -> Any:
    """An object as its JSON, in the order it has. Text is left as it is."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("json_text", "must be an object, or its JSON as a string")
    return to_json(value).decode()


def _as_backend(word: str) -> str | None:
    if word not in _BACKEND_BY_WORD:
        names = ", ".join(_BACKEND_BY_WORD)
        raise PydanticCustomError("backend", "must be one of {names}", {"names": names})
    return _BACKEND_BY_WORD[word]


JsonText = Annotated[
    Any,
    AfterValidator(_as_json_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]
Backend = Annotated[str, AfterValidator(_as_backend)]


class JsonSchemaFormat(Wire):
    """OpenAI's `json_schema`. Any schema that can be enforced is taken, `strict` or not."""

    schema_: JsonText = Field(default=None, alias="schema")
    strict: bool | None = None
    name: str | None = None  # of no effect here
    description: Accepted = None


class ResponseFormat(Wire):
    """OpenAI's `response_format`, with structural tags in both of their forms."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    def constraint(self, at: str) -> GivenConstraint | None:
        """What it asks for; it stands at `at` in the body. Raises ApiError."""
        self._check_fields(at)
        match self.type:
            case "text":
                return None
            case "json_object":
                return GivenConstraint(at, ConstraintSpec.json_schema({"type": "object"}))
            case "json_schema":
                return self._schema(f"{at}.json_schema")
            case "structural_tag":
                return GivenConstraint(at, self._structural_tag(at))

    def _check_fields(self, at: str) -> None:
        """A field of another type would be ignored."""
        for field in ("json_schema", "format", "structures", "triggers"):
            if getattr(self, field) is not None and field not in _FIELDS_OF_TYPE[self.type]:
                raise ApiError(
                    400,
                    f"{at}.{field} is not for the type {self.type}; leave it out",
                    param=f"{at}.{field}",
                )

    def _schema(self, at: str) -> GivenConstraint:
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ApiError(
                400,
                f"{at}.schema is missing; give a schema, or use the type json_object",
                param=f"{at}.schema",
                code="missing_required_parameter",
            )
        whitespace = Whitespace.COMPACT if self.json_schema.strict else Whitespace.BOUNDED
        spec = _schema_spec(self.json_schema.schema_, whitespace)
        return GivenConstraint(f"{at}.schema", spec)

    def _structural_tag(self, at: str) -> ConstraintSpec:
        """The document as it came; what is in it is for those who know the notation."""
        fields = {field: getattr(self, field) for field in _FIELDS_OF_TYPE[self.type]}
        document = {field: value for field, value in fields.items() if value is not None}
        if set(document) not in ({"format"}, {"structures", "triggers"}):
            raise ApiError(
                400, f"{at} must have either format, or structures and triggers", param=at
            )
        return _tag_spec(to_json({"type": self.type} | document).decode())


class StructuredOutputs(Wire):
    """vLLM's `structured_outputs`."""

    json_: JsonText = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonText = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    backend: Backend | None = None
    disable_additional_properties: Annotated[Any, refused(_OPEN_OBJECTS, False)] = None
    disable_fallback: Accepted = None  # there is none: another backend is used where it is named

    def constraints(self, at: str) -> Iterator[GivenConstraint]:
        """What it asks for; it stands at `at` in the body. Raises ApiError."""
        whitespace = Whitespace.COMPACT if self.disable_any_whitespace else Whitespace.BOUNDED
        if self.json_ is not None:
            yield GivenConstraint(f"{at}.json", _schema_spec(self.json_, whitespace))
        if self.regex is not None:
            yield GivenConstraint(f"{at}.regex", ConstraintSpec.regex(self.regex))
        if self.choice is not None:
            yield GivenConstraint(f"{at}.choice", ConstraintSpec.choice(self.choice))
        if self.grammar is not None:
            yield _grammar(f"{at}.grammar", self.grammar)
        if self.json_object:
            spec = ConstraintSpec.json_schema({"type": "object"}, whitespace=whitespace)
            yield GivenConstraint(f"{at}.json_object", spec)
        if self.structural_tag is not None:
            spec = replace(_tag_spec(self.structural_tag), whitespace=whitespace)
            yield GivenConstraint(f"{at}.structural_tag", spec)


def _schema_spec(text: str, whitespace: Whitespace = Whitespace.BOUNDED) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, text=text, whitespace=whitespace)


def _tag_spec(text: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.STRUCTURAL_TAG, text=text)


def _grammar(path: str, text: str) -> GivenConstraint:
    with in_callers_words({"constraint": path}):
        return GivenConstraint(path, grammar_spec(text))


# -- requests --------------------------------------------------------------------------------------


class NativeConstraintFields(Wire):
    """SGLang's fields, of which an empty text counts as not given."""

    json_schema: JsonText = None
    regex: str | None = None
    ebnf: str | None = None

    def _native_constraints(self, prefix: str = "") -> Iterator[GivenConstraint]:
        """What they ask for; `prefix` leads to them. Raises ApiError."""
        if self.json_schema:
            yield GivenConstraint(f"{prefix}json_schema", _schema_spec(self.json_schema))
        if self.regex:
            yield GivenConstraint(f"{prefix}regex", ConstraintSpec.regex(self.regex))
        if self.ebnf:
            yield _grammar(f"{prefix}ebnf", self.ebnf)


class NativeSamplingConstraintFields(NativeConstraintFields):
    """Those that SGLang takes in `sampling_params`."""

    structural_tag: JsonText = None

    def constraint(self, at: str) -> GivenConstraint | None:
        """The constraint of the options that stand at `at`. Raises ApiError."""
        return only_constraint(self._native_constraints_and_tag(f"{at}."))

    def _native_constraints_and_tag(self, prefix: str) -> Iterator[GivenConstraint]:
        yield from self._native_constraints(prefix)
        if self.structural_tag:
            yield GivenConstraint(f"{prefix}structural_tag", _tag_spec(self.structural_tag))


class OpenAIConstraintFields(NativeConstraintFields):
    """Those of the OpenAI endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Backend | None = None

    @cached_property
    def constraint(self) -> GivenConstraint | None:
        """What the answer must satisfy. Raises ApiError."""
        given = only_constraint(self._constraints())
        if given is not None:
            spec = self._with_backend(self._with_whitespace(given.spec))
            return GivenConstraint(given.path, spec)
        if self.structured_outputs is not None:
            raise ApiError(
                400,
                "structured_outputs has no constraint; give json, regex, choice, grammar, "
                "json_object or structural_tag, or leave it out",
                param="structured_outputs",
            )
        if self.guided_whitespace_pattern is not None:
            raise _not_json("guided_whitespace_pattern")
        return None

    def _constraints(self) -> Iterator[GivenConstraint]:
        if self.response_format is not None:
            in_format = self.response_format.constraint("response_format")
            if in_format is not None:
                yield in_format
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints("structured_outputs")
        yield from self._native_constraints()
        yield from self._guided_constraints()

    def _guided_constraints(self) -> Iterator[GivenConstraint]:
        """vLLM's fields of before `structured_outputs`."""
        if self.guided_json is not None:
            yield GivenConstraint("guided_json", _schema_spec(self.guided_json))
        if self.guided_regex is not None:
            yield GivenConstraint("guided_regex", ConstraintSpec.regex(self.guided_regex))
        if self.guided_choice is not None:
            yield GivenConstraint("guided_choice", ConstraintSpec.choice(self.guided_choice))
        if self.guided_grammar is not None:
            yield _grammar("guided_grammar", self.guided_grammar)

    def _with_whitespace(self, spec: ConstraintSpec) -> ConstraintSpec:
        newer = self.structured_outputs or StructuredOutputs()
        path, pattern = _only_option(
            ("structured_outputs.whitespace_pattern", newer.whitespace_pattern),
            ("guided_whitespace_pattern", self.guided_whitespace_pattern),
        )
        if pattern is None:
            return spec
        if spec.kind not in WHITESPACE_KINDS:
            raise _not_json(path)
        if not pattern:
            return replace(spec, whitespace=Whitespace.COMPACT)
        if newer.disable_any_whitespace:
            raise ApiError(
                400,
                f"{path} is given and disable_any_whitespace is true; give one of them",
                param=path,
            )
        return replace(spec, whitespace_pattern=pattern)

    def _with_backend(self, spec: ConstraintSpec) -> ConstraintSpec:
        newer = self.structured_outputs or StructuredOutputs()
        _, backend = _only_option(
            ("structured_outputs.backend", newer.backend),
            ("guided_decoding_backend", self.guided_decoding_backend),
        )
        return replace(spec, backend=backend)


def _not_json(path: str) -> ApiError:
    return ApiError(400, f"{path} is for JSON, and none is asked for; leave it out", param=path)


def _only_option(*given: tuple[str, str | None]) -> tuple[str, str | None]:
    """The option that is not None, with its path. Raises ApiError for two that differ."""
    present = [(path, value) for path, value in given if value is not None]
    if len({value for _, value in present}) > 1:
        (first, _), (second, _) = present
        raise ApiError(400, f"{first} and {second} differ; give one of them", param=second)
    return present[0] if present else given[0]
