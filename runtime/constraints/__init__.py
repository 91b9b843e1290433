"""Structured generation: what an answer must satisfy, and who enforces it."""

from collections.abc import Mapping
from types import MappingProxyType

# By name, `module:factory` of a `ConstraintBackend`: called with a `Vocabulary`, it makes one.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "llguidance": "sapwood.runtime.constraints.llguidance_backend:make_backend",
        "outlines_core": "sapwood.runtime.constraints.outlines_core_backend:OutlinesCoreBackend",
        "xgrammar": "sapwood.runtime.constraints.xgrammar_backend:XgrammarBackend",
    }
)
