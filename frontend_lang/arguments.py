"""Whose a keyword of `run(...)` is: the program's, an option of its answers, or of the run.

A program's own parameters come first, whatever they are called; `with_options(...)` reaches an
option that a parameter hides.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, cast

from sapwood.frontend_lang.nodes import is_state
from sapwood.frontend_lang.options import ALIASES, OPTION_NAMES, Options, by_own_names, given

if TYPE_CHECKING:
    from sapwood.frontend_lang.backends.interface import Backend


class Settings(TypedDict, total=False):
    """How a program is run, beside the options of its answers."""

    backend: "Backend | None"
    stream: bool  # return at once; the texts are read while they come
    timeout: float | None  # seconds of the whole run
    use_thread: bool  # SGLang's; nothing here needs a thread of its own, so it changes nothing


SETTING_NAMES = frozenset(Settings.__annotations__)
RUN_DEFAULTS: Mapping[str, Any] = MappingProxyType({"max_tokens": 128})  # SGLang's


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a program behind its state."""

    names: tuple[str, ...]
    takes_any: bool  # it has **keywords: they take what nobody else knows

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Parameters":
        """Raises TypeError where there is no parameter for the state."""
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(
                f"{function.__qualname__} needs a first parameter for its state, as in "
                f"def {function.__name__}(s, question)"
            )
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(
            tuple(each.name for each in parameters[1:] if each.kind in named),
            any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What a program is called with. Layers (`bind`, `with_options`, `run`) are joined by
    `over`."""

    positional: Sequence[Any] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=lambda: Options())
    settings: Settings = field(default_factory=lambda: Settings())

    def over(self, base: "Invocation") -> "Invocation":
        """Both, where this one has the say."""
        return Invocation(
            positional=(*base.positional, *self.positional),
            arguments={**base.arguments, **self.arguments},
            options=cast(Options, {**base.options, **self.options}),
            settings=cast(Settings, {**base.settings, **self.settings}),
        )


def invocation_of(
    parameters: Parameters, positional: Sequence[Any], named: Mapping[str, Any]
) -> Invocation:
    """Every keyword to whom it belongs. Raises TypeError for a name that nobody has."""
    own = {name: value for name, value in named.items() if name in parameters.names}
    rest = {name: value for name, value in named.items() if name not in own}
    if parameters.takes_any:
        own |= {name: value for name, value in rest.items() if not _is_known(name)}
        rest = {name: value for name, value in rest.items() if name not in own}
    options = options_of(rest, also_known=parameters.names)
    return Invocation(
        positional=tuple(positional),
        arguments=own,
        options=options.options,
        settings=options.settings,
    )


def options_of(named: Mapping[str, Any], *, also_known: Iterable[str] = ()) -> Invocation:
    """Options and settings by name, none of the program's. Raises TypeError for others, which
    names what is near, `also_known` too."""
    for name in named:
        if not _is_known(name):
            raise TypeError(_unknown(name, also_known))
    settings = {name: value for name, value in named.items() if name in SETTING_NAMES}
    _check_timeout(settings.get("timeout"))
    options = {name: value for name, value in named.items() if name not in settings}
    return Invocation(options=given(by_own_names(options)), settings=cast(Settings, settings))


def check_call(function: Callable[..., Any], invocation: Invocation) -> None:
    """Raises TypeError where the program's own arguments are missing or doubled."""
    try:
        inspect.signature(function).bind(None, *invocation.positional, **invocation.arguments)
    except TypeError as error:
        is_with_state = any(is_state(value) for value in invocation.positional)
        advice = (
            "; the state is passed by itself, and for steps inside another program use a plain "
            "function without @function"
        )
        raise TypeError(
            f"{function.__qualname__}: {error}{advice if is_with_state else ''}"
        ) from None


def _is_known(name: str) -> bool:
    return name in OPTION_NAMES or name in SETTING_NAMES or name in ALIASES


def _unknown(name: str, parameters: Iterable[str]) -> str:
    own = tuple(parameters)
    what = "argument or option" if own else "option"
    near = get_close_matches(name, sorted({*own, *OPTION_NAMES, *SETTING_NAMES, *ALIASES}), n=3)
    takes = f"the program takes {', '.join(own)}; " if own else ""
    if near:
        hint = f"did you mean {' or '.join(near)}?"
        return f"unknown {what} {name!r}; {takes}{hint}"
    return f"unknown {what} {name!r}; {takes}options are {', '.join(sorted(OPTION_NAMES))}"


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not timeout > 0:  # type: ignore[operator]
        raise TypeError(f"timeout is a number of seconds above 0, not {timeout!r}")
