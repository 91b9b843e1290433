"""What a process has once: the loop in the background, and the default backend of programs.

The one place of this package that changes after import. Both are the process's own by nature:
`set_default_backend` holds for all threads, and a loop for each caller would be a thread for each.
"""

from typing import Any, cast

from sapwood.frontend_lang.backends.interface import Backend
from sapwood.frontend_lang.background import Background
from sapwood.frontend_lang.errors import ProgramUsageError


class Process:
    """The loop and the default backend."""

    def __init__(self) -> None:
        self.background = Background()
        self._default_backend: Backend | None = None

    def set_default_backend(self, backend: object) -> None:
        """The backend of every program that is run without one; None: none again."""
        self._default_backend = None if backend is None else as_backend(backend)

    @property
    def has_default_backend(self) -> bool:
        return self._default_backend is not None

    def backend(self, backend: object = None) -> Backend:
        """`backend`, or the default one. Raises ProgramUsageError where there is neither."""
        if backend is not None:
            return as_backend(backend)
        if self._default_backend is None:
            raise ProgramUsageError(
                "a program needs a backend: call sapwood.set_default_backend(...) once, or give "
                "run(..., backend=...); an Engine, or RuntimeEndpoint('http://127.0.0.1:8000')"
            )
        return self._default_backend


PROCESS = Process()


def as_backend(backend: object) -> Backend:
    """A backend, also of an `Engine` or `AsyncEngine`. Raises TypeError for what is neither."""
    if all(hasattr(backend, name) for name in ("generate", "stream", "score", "chat_only")):
        return cast(Backend, backend)
    if hasattr(backend, "generate") and type(backend).__module__.startswith("sapwood.runtime."):
        from sapwood.frontend_lang.backends.engine import EngineBackend

        return EngineBackend(cast(Any, backend))
    raise TypeError(
        "a backend is an Engine, a RuntimeEndpoint, an OpenAI, ... object, not of "
        f"{type(backend).__name__}"
    )
