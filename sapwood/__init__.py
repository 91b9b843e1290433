"""Sapwood: a prefix-sharing inference runtime.

    from sapwood import Engine, SamplingParams

    with Engine("smollm2") as engine:
        [output] = engine.generate("The capital of France is", SamplingParams(max_tokens=8))

and its frontend language, for programs that fork, share and constrain:

    import sapwood as sgl

    @sgl.function
    def ask(s, question):
        s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=32))

The names below are loaded on first use: `import sapwood` itself imports no torch.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapwood.frontend_lang.backends.anthropic import Anthropic as Anthropic
    from sapwood.frontend_lang.backends.openai import LiteLLM as LiteLLM
    from sapwood.frontend_lang.backends.openai import OpenAI as OpenAI
    from sapwood.frontend_lang.backends.recording import Recording as Recording
    from sapwood.frontend_lang.backends.runtime_endpoint import RuntimeEndpoint as RuntimeEndpoint
    from sapwood.frontend_lang.backends.server_process import Runtime as Runtime
    from sapwood.frontend_lang.choices import greedy_token_selection as greedy_token_selection
    from sapwood.frontend_lang.choices import token_length_normalized as token_length_normalized
    from sapwood.frontend_lang.choices import (
        unconditional_likelihood_normalized as unconditional_likelihood_normalized,
    )
    from sapwood.frontend_lang.errors import ProgramError as ProgramError
    from sapwood.frontend_lang.errors import ProgramTimeoutError as ProgramTimeoutError
    from sapwood.frontend_lang.errors import ProgramUsageError as ProgramUsageError
    from sapwood.frontend_lang.errors import UnknownVariableError as UnknownVariableError
    from sapwood.frontend_lang.forks import ForkGroup as ForkGroup
    from sapwood.frontend_lang.primitives import assistant as assistant
    from sapwood.frontend_lang.primitives import assistant_begin as assistant_begin
    from sapwood.frontend_lang.primitives import assistant_end as assistant_end
    from sapwood.frontend_lang.primitives import flush_cache as flush_cache
    from sapwood.frontend_lang.primitives import function as function
    from sapwood.frontend_lang.primitives import gen as gen
    from sapwood.frontend_lang.primitives import gen_int as gen_int
    from sapwood.frontend_lang.primitives import gen_string as gen_string
    from sapwood.frontend_lang.primitives import get_server_info as get_server_info
    from sapwood.frontend_lang.primitives import image as image
    from sapwood.frontend_lang.primitives import pause as pause
    from sapwood.frontend_lang.primitives import select as select
    from sapwood.frontend_lang.primitives import separate_reasoning as separate_reasoning
    from sapwood.frontend_lang.primitives import set_default_backend as set_default_backend
    from sapwood.frontend_lang.primitives import system as system
    from sapwood.frontend_lang.primitives import system_begin as system_begin
    from sapwood.frontend_lang.primitives import system_end as system_end
    from sapwood.frontend_lang.primitives import user as user
    from sapwood.frontend_lang.primitives import user_begin as user_begin
    from sapwood.frontend_lang.primitives import user_end as user_end
    from sapwood.frontend_lang.primitives import video as video
    from sapwood.frontend_lang.program import Program as Program
    from sapwood.frontend_lang.state import ProgramState as ProgramState
    from sapwood.frontend_lang.trace_state import TraceError as TraceError
    from sapwood.frontend_lang.values import AnswerError as AnswerError
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
        "AnswerError": "sapwood.frontend_lang.values",
        "Anthropic": "sapwood.frontend_lang.backends.anthropic",
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
        "ForkGroup": "sapwood.frontend_lang.forks",
        "Hints": "sapwood.runtime.hints",
        "LiteLLM": "sapwood.frontend_lang.backends.openai",
        "Logprob": "sapwood.runtime.outputs",
        "ModelAccessError": "sapwood.runtime.errors",
        "ModelError": "sapwood.runtime.errors",
        "ModelNotFoundError": "sapwood.runtime.errors",
        "OpenAI": "sapwood.frontend_lang.backends.openai",
        "Program": "sapwood.frontend_lang.program",
        "ProgramError": "sapwood.frontend_lang.errors",
        "ProgramState": "sapwood.frontend_lang.state",
        "ProgramTimeoutError": "sapwood.frontend_lang.errors",
        "ProgramUsageError": "sapwood.frontend_lang.errors",
        "Recording": "sapwood.frontend_lang.backends.recording",
        "RequestError": "sapwood.runtime.errors",
        "RequestMetrics": "sapwood.runtime.outputs",
        "RequestOutput": "sapwood.runtime.outputs",
        "Runtime": "sapwood.frontend_lang.backends.server_process",
        "RuntimeEndpoint": "sapwood.frontend_lang.backends.runtime_endpoint",
        "SamplingParams": "sapwood.runtime.sampling_params",
        "SapwoodError": "sapwood.runtime.errors",
        "TokenLogprobs": "sapwood.runtime.outputs",
        "TraceError": "sapwood.frontend_lang.trace_state",
        "UnknownVariableError": "sapwood.frontend_lang.errors",
        "UnsupportedModelError": "sapwood.runtime.errors",
        "Whitespace": "sapwood.runtime.constraints.spec",
        "assistant": "sapwood.frontend_lang.primitives",
        "assistant_begin": "sapwood.frontend_lang.primitives",
        "assistant_end": "sapwood.frontend_lang.primitives",
        "constraint_of": "sapwood.runtime.constraints.output_types",
        "flush_cache": "sapwood.frontend_lang.primitives",
        "function": "sapwood.frontend_lang.primitives",
        "gen": "sapwood.frontend_lang.primitives",
        "gen_int": "sapwood.frontend_lang.primitives",
        "gen_string": "sapwood.frontend_lang.primitives",
        "get_server_info": "sapwood.frontend_lang.primitives",
        "greedy_token_selection": "sapwood.frontend_lang.choices",
        "image": "sapwood.frontend_lang.primitives",
        "pause": "sapwood.frontend_lang.primitives",
        "select": "sapwood.frontend_lang.primitives",
        "separate_reasoning": "sapwood.frontend_lang.primitives",
        "set_default_backend": "sapwood.frontend_lang.primitives",
        "system": "sapwood.frontend_lang.primitives",
        "system_begin": "sapwood.frontend_lang.primitives",
        "system_end": "sapwood.frontend_lang.primitives",
        "token_length_normalized": "sapwood.frontend_lang.choices",
        "unconditional_likelihood_normalized": "sapwood.frontend_lang.choices",
        "user": "sapwood.frontend_lang.primitives",
        "user_begin": "sapwood.frontend_lang.primitives",
        "user_end": "sapwood.frontend_lang.primitives",
        "video": "sapwood.frontend_lang.primitives",
    }
)

# Names that programs written for SGLang may ask for.
_ADVICE_BY_MISSING_NAME: Mapping[str, str] = MappingProxyType(
    {"VertexAI": "; OpenAI(model, base_url=...) or LiteLLM reaches models served elsewhere"}
)

__all__ = ["__version__", *_MODULE_BY_NAME]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        advice = _ADVICE_BY_MISSING_NAME.get(name, "")
        raise AttributeError(f"module 'sapwood' has no attribute {name!r}{advice}")
    value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
