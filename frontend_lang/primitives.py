"""What programs are written with: `gen`, `select`, roles, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, Unpack, overload

from sapwood.frontend_lang.choices import (
    ChoicesMethod,
    checked_choices,
    checked_method,
    token_length_normalized,
)
from sapwood.frontend_lang.constraint import constraint_of_options, with_number_stops
from sapwood.frontend_lang.nodes import (
    ASSISTANT,
    SYSTEM,
    USER,
    Gen,
    Node,
    Pause,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    as_node,
)
from sapwood.frontend_lang.options import GenOptions, by_own_names, given
from sapwood.frontend_lang.process import PROCESS
from sapwood.frontend_lang.program import Program
from sapwood.runtime.errors import RequestError

T = TypeVar("T")


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> Program: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function whose first argument is the state.

    `num_api_spec_tokens`: let an API generate that many tokens past a stop, and answer the next
    `gen`s from what it wrote where it fits.
    """
    if func is not None:
        return Program(func, num_api_spec_tokens)
    return lambda decorated: Program(decorated, num_api_spec_tokens)


Dtype = Literal["int", "float", "str", "bool"]


@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    output_type: type[T],
    **options: Unpack[GenOptions],
) -> Gen[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    dtype: type[T],
    **options: Unpack[GenOptions],
) -> Gen[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    dtype: Dtype,
    **options: Unpack[GenOptions],
) -> Gen[Any]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    output_type: object,
    **options: Unpack[GenOptions],
) -> Gen[Any]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    **options: Unpack[GenOptions],
) -> Gen[str]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str],
    choices_method: ChoicesMethod | None = None,
    **options: Unpack[GenOptions],
) -> Select: ...
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    **options: Any,
) -> Gen[Any] | Select:
    """Text of the model, kept as variable `name`; with `choices`, one of them.

    Options are those of `Options`; those that are left out are `run`'s. Raises TypeError for an
    unknown one, and RequestError for a constraint that cannot be.
    """
    if choices is not None:
        if max_tokens is not None or options:
            named = ", ".join(sorted(options)) or "max_tokens"
            raise TypeError(f"gen with choices is select, and takes no {named}")
        return select(name, choices, choices_method=choices_method)
    if choices_method is not None:
        raise TypeError("choices_method says how to take one of choices; give choices too")
    return _gen(name, max_tokens, options)


def gen_int(
    name: str | None = None, max_tokens: int | None = None, **options: Unpack[GenOptions]
) -> Gen[int]:
    """A whole number."""
    return _gen(name, max_tokens, {**options, "dtype": int})


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **options: Unpack[GenOptions]
) -> Gen[str]:
    """A text in double quotes."""
    return _gen(name, max_tokens, {**options, "dtype": str})


def _gen(name: str | None, max_tokens: int | None, options: dict[str, Any]) -> Gen[Any]:
    _check_name(name)
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    checked = given(by_own_names({**options, **limit}))
    return Gen(name, with_number_stops(checked), constraint_of_options(checked))


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Select:
    """The one of `choices` that the model finds likeliest, as `choices_method` compares them."""
    _check_name(name)
    if temperature:
        raise RequestError(
            "select takes the likeliest choice, and draws none; leave temperature out",
            param="temperature",
        )
    method = token_length_normalized if choices_method is None else checked_method(choices_method)
    return Select(name, checked_choices(choices), method)


def _check_name(name: object) -> None:
    if name is not None and not (isinstance(name, str) and name):
        raise TypeError(
            f"the name of a variable is a text, not {name!r}; it comes first, as in gen(name) and "
            "select(name, choices)"
        )


def system(expr: Node | str | None = None) -> Node:
    """A system message."""
    return _role(SYSTEM, expr)


def user(expr: Node | str | None = None) -> Node:
    """A user's message."""
    return _role(USER, expr)


def assistant(expr: Node | str | None = None) -> Node:
    """A message of the model."""
    return _role(ASSISTANT, expr)


def _role(role: str, expr: Node | str | None) -> Node:
    return RoleBegin(role) + as_node("" if expr is None else expr) + RoleEnd(role)


def system_begin() -> Node:
    """Where a system message begins."""
    return RoleBegin(SYSTEM)


def system_end() -> Node:
    """Where it ends."""
    return RoleEnd(SYSTEM)


def user_begin() -> Node:
    """Where a user's message begins."""
    return RoleBegin(USER)


def user_end() -> Node:
    """Where it ends."""
    return RoleEnd(USER)


def assistant_begin() -> Node:
    """Where a message of the model begins."""
    return RoleBegin(ASSISTANT)


def assistant_end() -> Node:
    """Where it ends."""
    return RoleEnd(ASSISTANT)


def separate_reasoning(expr: Node | str, model_type: str | None = None) -> Node:
    """Keep the reasoning of each `gen` in `expr` apart, as `<name>_reasoning_content`."""
    return SeparateReasoning(as_node(expr), model_type)


def pause(seconds: float) -> Node:
    """Says that the program is away for about so long here; its prefix is kept meanwhile."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise TypeError(f"pause takes a number of seconds from 0, not {seconds!r}")
    return Pause(seconds)


def set_default_backend(backend: object) -> None:
    """The backend of every program that is run without one: an `Engine`, an endpoint, ..."""
    PROCESS.set_default_backend(backend)


def flush_cache(backend: object = None) -> None:
    """Forget what the backend has cached."""
    PROCESS.background.run(PROCESS.backend(backend).flush_cache())


def get_server_info(backend: object = None) -> Mapping[str, Any]:
    """What the backend tells of itself."""
    return PROCESS.background.run(PROCESS.backend(backend).server_info())


def image(path: str) -> NoReturn:
    """Raises RequestError: models here read text."""
    raise RequestError("images are not supported: models here read text only", param="image")


def video(path: str, num_frames: int) -> NoReturn:
    """Raises RequestError: models here read text."""
    raise RequestError("videos are not supported: models here read text only", param="video")
