"""Which arguments of `run` are the program's own, and which say how to run it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from sapwood.frontend_lang.options import OPTION_NAMES, Options, given

DEFAULTS: Mapping[str, Any] = MappingProxyType({"max_tokens": 128, "temperature": 1.0})
_ALIASES: Mapping[str, str] = MappingProxyType({"max_new_tokens": "max_tokens"})
_CONTROLS = frozenset({"backend", "stream", "timeout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """The arguments of one run, sorted."""

    of_program: Mapping[str, Any]
    options: Options = field(default_factory=lambda: Options())
    backend: object = None
    stream: bool = False
    timeout: float | None = None


def sorted_arguments(
    parameters: Sequence[inspect.Parameter], arguments: Mapping[str, Any]
) -> RunArguments:
    """A name of the program's own parameters is always the program's.

    Raises TypeError for a name that is neither that, nor an option.
    """
    own = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    of_program: dict[str, Any] = {}
    controls: dict[str, Any] = {}
    options: dict[str, Any] = dict(DEFAULTS)
    for name, value in arguments.items():
        if name in own:
            of_program[name] = value
        elif name in _CONTROLS:
            controls[name] = value
        elif _ALIASES.get(name, name) in OPTION_NAMES:
            options[_ALIASES.get(name, name)] = value
        elif takes_any:
            of_program[name] = value
        else:
            raise TypeError(_unknown(name, own))
    return RunArguments(of_program=of_program, options=given(options), **controls)


def _unknown(name: str, own: set[str]) -> str:
    near = get_close_matches(name, own | OPTION_NAMES | _CONTROLS | set(_ALIASES), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    listed = ", ".join(sorted(own)) or "none"
    return f"{name!r} is neither an argument of the program (it has {listed}) nor an option{hint}"
