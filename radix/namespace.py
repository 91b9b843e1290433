"""Namespaces: which requests may share prefixes. Knows nothing of tokens or blocks."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class NamespaceKind(StrEnum):
    """What a part of a namespace stands for."""

    MODEL = "model"
    """The weights that computed the keys and values, with their epoch."""
    TENANT = "tenant"
    """Whose requests they are."""
    SALT = "salt"
    """A caller's own wall inside a tenant."""
    ADAPTER = "adapter"
    """Low-rank weights laid over the model's."""


@dataclass(frozen=True, slots=True)
class NamespacePart:
    """One typed part of a namespace; two kinds with the same value are never equal.

    Raises TypeError for a kind that is no `NamespaceKind` or a value that is no string.
    """

    kind: NamespaceKind
    value: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, NamespaceKind):
            raise TypeError(
                f"a namespace part's kind must be a NamespaceKind, got {self.kind!r}; "
                f"use one of {', '.join(map(str, NamespaceKind))}"
            )
        if not isinstance(self.value, str):
            raise TypeError(
                f"a namespace part's value must be a string, got {self.value!r}; convert it"
            )


Namespace: TypeAlias = tuple[NamespacePart, ...]
"""Requests share prefixes if and only if their namespaces are equal, parts and order."""


def check_namespace(namespace: Namespace) -> None:
    """Raise TypeError unless `namespace` is a tuple of `NamespacePart`. O(parts)."""
    if not isinstance(namespace, tuple) or any(type(p) is not NamespacePart for p in namespace):
        raise TypeError(
            f"a namespace must be a tuple of NamespacePart, got {namespace!r}; "
            "untyped parts of two kinds could meet, so wrap each in NamespacePart(kind, value)"
        )
