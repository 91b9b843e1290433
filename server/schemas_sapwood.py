"""What is asked for in the object `sapwood` of a request: what no other server's API has."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.hints import NO_HINTS, Hints
from sapwood.server.errors import ApiError
from sapwood.server.schemas import Wire, in_callers_words
from sapwood.server.schemas_constraints import Backend, GivenConstraint

HINT_NAMES = tuple(field.name for field in fields(Hints))


class SapwoodFields(Wire):
    """What every endpoint that generates takes. `hints` has the fields of `Hints`."""

    hints: Annotated[
        dict[str, Any] | None,
        WithJsonSchema({"type": "object", "properties": {name: {} for name in HINT_NAMES}}),
    ] = None

    def asked_hints(self, at: str) -> Hints:
        """The hints of the object that stands at `at` in the body. Raises ApiError."""
        given = {name: value for name, value in (self.hints or {}).items() if value is not None}
        path = f"{at}.hints"
        for name in given:
            if name not in HINT_NAMES:
                raise ApiError(
                    400,
                    f"unknown field {path}.{name[:64]}; there are {', '.join(HINT_NAMES)}",
                    param=f"{path}.{name[:64]}",
                    code="unknown_parameter",
                )
        with in_callers_words({"hints": path}):
            return Hints(**given)


def hints_of(given: SapwoodFields | None) -> Hints:
    """Those of a request with one object for all its prompts. Raises ApiError."""
    return NO_HINTS if given is None else given.asked_hints("sapwood")


class ConstraintFields(Wire):
    """A constraint as we say it: the fields of `ConstraintSpec`."""

    kind: Annotated[ConstraintKind, Field(strict=False)]
    text: str
    whitespace: Annotated[Whitespace, Field(strict=False)] = Whitespace.BOUNDED
    whitespace_pattern: str | None = None
    backend: Backend | None = None

    def spec(self) -> ConstraintSpec:
        return ConstraintSpec(
            kind=self.kind,
            text=self.text,
            whitespace=self.whitespace,
            whitespace_pattern=self.whitespace_pattern,
            backend=self.backend,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the object, which stands at `at` in the body, asks for one prompt of `/generate`."""

    at: str
    hints: Hints
    text_ids: bool
    separate_reasoning: bool | str
    constraint: GivenConstraint | None


class NativeSapwoodFields(SapwoodFields):
    """What `/generate` takes besides.

    `text_ids`: answers have `sapwood.text_ids`, token ids that spell exactly their text.
    `separate_reasoning`: they have `sapwood.reasoning`, and their text and its ids are without it;
    true: as the model marks it, or the name of a way to mark it.
    """

    text_ids: bool | None = None
    separate_reasoning: bool | str | None = None
    constraint: ConstraintFields | None = None

    def asked(self, at: str) -> Asked:
        """What is asked by the object that stands at `at` in the body. Raises ApiError."""
        constraint = None
        if self.constraint is not None:
            constraint = GivenConstraint(f"{at}.constraint", self.constraint.spec())
        return Asked(
            at=at,
            hints=self.asked_hints(at),
            text_ids=bool(self.text_ids),
            separate_reasoning=self.separate_reasoning or False,
            constraint=constraint,
        )
