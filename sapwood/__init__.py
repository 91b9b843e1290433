"""Sapwood: a prefix-sharing inference runtime.

    from sapwood import Engine, SamplingParams

    with Engine("smollm2") as engine:
        [output] = engine.generate("The capital of France is", SamplingParams(max_tokens=8))

The names below are loaded on first use: `import sapwood` itself imports no torch.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapwood.runtime.async_engine import AsyncEngine as AsyncEngine
    from sapwood.runtime.chat import Chat as Chat
    from sapwood.runtime.chat import ChatOptions as ChatOptions
    from sapwood.runtime.constraints.output_types import constraint_of as constraint_of
    from sapwood.runtime.constraints.spec import ConstraintSpec as ConstraintSpec
    from sapwood.runtime.constraints.spec import Whitespace as Whitespace
    from sapwood.runtime.engine import Engine as Engine
    from sapwood.runtime.errors import ConfigError as ConfigError
    from sapwood.runtime.errors import ContextLengthError as ContextLengthError
    from sapwood.runtime.errors import EngineBusyError as EngineBusyError
    from sapwood.runtime.errors import EngineClosedError as EngineClosedError
    from sapwood.runtime.errors import EngineError as EngineError
    from sapwood.runtime.errors import ModelAccessError as ModelAccessError
    from sapwood.runtime.errors import ModelError as ModelError
    from sapwood.runtime.errors import ModelNotFoundError as ModelNotFoundError
    from sapwood.runtime.errors import RequestError as RequestError
    from sapwood.runtime.errors import SapwoodError as SapwoodError
    from sapwood.runtime.errors import UnsupportedModelError as UnsupportedModelError
    from sapwood.runtime.hints import Hints as Hints
    from sapwood.runtime.outputs import CompletionOutput as CompletionOutput
    from sapwood.runtime.outputs import FinishReason as FinishReason
    from sapwood.runtime.outputs import Logprob as Logprob
    from sapwood.runtime.outputs import RequestMetrics as RequestMetrics
    from sapwood.runtime.outputs import RequestOutput as RequestOutput
    from sapwood.runtime.outputs import TokenLogprobs as TokenLogprobs
    from sapwood.runtime.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_MODULE_BY_NAME: Mapping[str, str] = MappingProxyType(
    {
        "AsyncEngine": "sapwood.runtime.async_engine",
        "Chat": "sapwood.runtime.chat",
        "ChatOptions": "sapwood.runtime.chat",
        "CompletionOutput": "sapwood.runtime.outputs",
        "ConfigError": "sapwood.runtime.errors",
        "ConstraintSpec": "sapwood.runtime.constraints.spec",
        "ContextLengthError": "sapwood.runtime.errors",
        "Engine": "sapwood.runtime.engine",
        "EngineBusyError": "sapwood.runtime.errors",
        "EngineClosedError": "sapwood.runtime.errors",
        "EngineError": "sapwood.runtime.errors",
        "FinishReason": "sapwood.runtime.outputs",
        "Hints": "sapwood.runtime.hints",
        "Logprob": "sapwood.runtime.outputs",
        "ModelAccessError": "sapwood.runtime.errors",
        "ModelError": "sapwood.runtime.errors",
        "ModelNotFoundError": "sapwood.runtime.errors",
        "RequestError": "sapwood.runtime.errors",
        "RequestMetrics": "sapwood.runtime.outputs",
        "RequestOutput": "sapwood.runtime.outputs",
        "SamplingParams": "sapwood.runtime.sampling_params",
        "SapwoodError": "sapwood.runtime.errors",
        "TokenLogprobs": "sapwood.runtime.outputs",
        "UnsupportedModelError": "sapwood.runtime.errors",
        "Whitespace": "sapwood.runtime.constraints.spec",
        "constraint_of": "sapwood.runtime.constraints.output_types",
    }
)

__all__ = ["__version__", *_MODULE_BY_NAME]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'sapwood' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
