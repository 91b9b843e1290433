"""Structured generation: what an answer must satisfy, and who enforces it."""

from collections.abc import Mapping
from types import MappingProxyType

# By name, `module:class` of a `ConstraintBackend` that is made with a `Vocabulary`.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "llguidance": "sapwood.runtime.constraints.llguidance_backend:LlguidanceBackend",
        "outlines_core": "sapwood.runtime.constraints.outlines_core_backend:OutlinesCoreBackend",
        "xgrammar": "sapwood.runtime.constraints.xgrammar_backend:XgrammarBackend",
    }
)
