"""Backends for all tests of this folder: one takes seconds to make."""

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from sapwood.runtime.constraints import BACKENDS
from sapwood.runtime.constraints.interface import ConstraintBackend, Vocabulary
from tests.runtime.constraints.vocabularies import tiny_vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The tiny one."""
    return tiny_vocabulary()


@pytest.fixture(scope="session")
def backend_named(vocabulary: Vocabulary) -> Iterator[Callable[[str], ConstraintBackend]]:
    """By its name, each backend with the tiny vocabulary, made when it is first wanted."""
    backends: dict[str, ConstraintBackend] = {}

    def named(name: str) -> ConstraintBackend:
        if name not in backends:
            module, attribute = BACKENDS[name].split(":")
            backends[name] = getattr(import_module(module), attribute)(vocabulary)
        return backends[name]

    yield named
    for backend in backends.values():
        backend.close()
