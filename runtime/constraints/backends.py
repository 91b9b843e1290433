"""The constraint backends of one engine, each made when it is first wanted."""

import logging
import threading
from collections.abc import Callable, Mapping
from importlib import import_module

from sapwood.runtime.constraints import BACKENDS
from sapwood.runtime.constraints.interface import ConstraintBackend, Vocabulary
from sapwood.runtime.errors import EngineClosedError, RequestError

logger = logging.getLogger(__name__)


class Backends:
    """Makes backends by name and keeps them until it is closed. Thread-safe.

    `names` are dotted names by name, as in `sapwood.runtime.constraints.BACKENDS`.
    `make_vocabulary` is called once, when the first backend is made.
    """

    def __init__(
        self, make_vocabulary: Callable[[], Vocabulary], *, names: Mapping[str, str] = BACKENDS
    ) -> None:
        self._names = names
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._backends: dict[str, ConstraintBackend] = {}
        self._locks = {name: threading.Lock() for name in names}  # each is made once
        self._closed = False

    def unknown(self, name: str) -> RequestError | None:
        """The error that there is no backend of that name; None if there is one."""
        if name in self._names:
            return None
        known = ", ".join(sorted(self._names))
        return RequestError(
            f"there is no constraint backend {name!r}; choose one of {known}, or leave it out",
            param="constraint",
            code="unknown_constraint_backend",
        )

    def get(self, name: str) -> ConstraintBackend:
        """The backend, made now if it was not before; that takes from 0.1 s to seconds.

        Raises RequestError for a name that is not registered, EngineClosedError after `close`, and
        whatever making it raises.
        """
        if (unknown := self.unknown(name)) is not None:
            raise unknown
        with self._locks[name]:
            if self._closed:
                raise EngineClosedError("the engine is closed; make a new one")
            if name not in self._backends:
                self._backends[name] = self._make(name)
            return self._backends[name]

    def close(self) -> None:
        """Close all that were made, and make no more. Waits for one that is being made."""
        self._closed = True
        for name, lock in self._locks.items():
            with lock:
                backend = self._backends.pop(name, None)
            if backend is not None:
                self._close(backend)

    def _close(self, backend: ConstraintBackend) -> None:
        try:
            backend.close()
        except Exception:
            logger.exception("the constraint backend %s could not be closed", backend.name)

    def _make(self, name: str) -> ConstraintBackend:
        module, attribute = self._names[name].split(":")
        backend: ConstraintBackend = getattr(import_module(module), attribute)(
            self._the_vocabulary()
        )
        return backend

    def _the_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary
