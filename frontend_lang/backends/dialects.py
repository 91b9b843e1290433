"""What servers make of OpenAI's API: each takes more than OpenAI's own, under names of its own.

A server says in its list of models who owns them, and by that it is known here (`DIALECTS`). One
that is not known gets OpenAI's fields alone, as what is not known to a server may be ignored by it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from sapwood.frontend_lang.backends.json_format import JsonFormat
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec, Whitespace
from sapwood.runtime.errors import RequestError

_SHARED_OPTIONS = frozenset(
    {
        "max_tokens", "temperature", "top_p", "n", "stop", "seed", "frequency_penalty",
        "presence_penalty", "logit_bias",
    }
)  # fmt: skip
LOGPROB_OPTIONS = frozenset({"return_logprob", "top_logprobs_num", "return_text_in_logprobs"})
_VLLM_OPTIONS = frozenset(
    {"top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"}
)


class ConstraintFields(StrEnum):
    """Where a constraint stands in a request."""

    RESPONSE_FORMAT = "response_format"  # JSON schemas in OpenAI's field, and nothing else
    STRUCTURED_OUTPUTS = "structured_outputs"  # all kinds in vLLM's
    REGEX_AND_EBNF = "regex_and_ebnf"  # SGLang's fields beside OpenAI's


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of server.

    `further_options` are served beyond OpenAI's. `is_openai`: OpenAI itself, whose defaults are the
    neutral ones, whose patterns in schemas are kept to, and which counts an answer's tokens in
    `max_completion_tokens`. `continues_messages`: it can go on with an assistant's message that
    has begun. `separates_reasoning`: reasoning is apart if it is asked for, and else in the text.
    `takes_hints`: it is our own.
    """

    name: str
    further_options: frozenset[str] = frozenset()
    constraint_fields: ConstraintFields = ConstraintFields.RESPONSE_FORMAT
    is_openai: bool = False
    continues_messages: bool = False
    separates_reasoning: bool = False
    takes_hints: bool = False

    @property
    def options(self) -> frozenset[str]:
        """Names of the options that it serves."""
        return _SHARED_OPTIONS | LOGPROB_OPTIONS | self.further_options


OPENAI = Dialect(name="openai", is_openai=True)
COMPATIBLE = Dialect(name="compatible")
VLLM = Dialect(
    name="vllm",
    further_options=_VLLM_OPTIONS,
    constraint_fields=ConstraintFields.STRUCTURED_OUTPUTS,
    continues_messages=True,
)
SGLANG = Dialect(
    name="sglang",
    further_options=_VLLM_OPTIONS | {"stop_regex"},
    constraint_fields=ConstraintFields.REGEX_AND_EBNF,
    continues_messages=True,
    separates_reasoning=True,
)
SAPWOOD = Dialect(
    name="sapwood",
    further_options=_VLLM_OPTIONS | {"stop_regex"},
    constraint_fields=ConstraintFields.STRUCTURED_OUTPUTS,
    continues_messages=True,
    separates_reasoning=True,
    takes_hints=True,
)
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {dialect.name: dialect for dialect in (OPENAI, COMPATIBLE, VLLM, SGLANG, SAPWOOD)}
)


def owner_of(models: Any) -> Dialect:
    """The dialect of the server that told this list of models. OpenAI's own name is no proof of
    OpenAI: proxies tell it of what they pass on."""
    try:
        owner = models["data"][0]["owned_by"]
    except (TypeError, KeyError, IndexError):
        return COMPATIBLE
    known = DIALECTS.get(owner, COMPATIBLE) if isinstance(owner, str) else COMPATIBLE
    return COMPATIBLE if known.is_openai else known


@dataclass(frozen=True, slots=True)
class Constrained:
    """Fields of a request, and what takes the text out of its answer (None: it is the text)."""

    fields: Mapping[str, Any]
    format: JsonFormat | None = None


def constrained(
    spec: ConstraintSpec | None, dialect: Dialect, *, api: str, is_chat: bool
) -> Constrained:
    """How `dialect` is told of a constraint. Raises RequestError where it cannot be."""
    if spec is None:
        return Constrained({})
    _check_whitespace(spec, dialect, api)
    if spec.backend is not None and not dialect.takes_hints:
        raise RequestError(
            f"{api} chooses its own way of constraining; leave out {spec.backend!r}",
            param="constraint",
        )
    match dialect.constraint_fields:
        case ConstraintFields.STRUCTURED_OUTPUTS:
            return Constrained({"structured_outputs": _structured_outputs(spec, api)})
        case ConstraintFields.REGEX_AND_EBNF:
            return Constrained(_sglang_fields(spec, api, is_chat=is_chat))
        case ConstraintFields.RESPONSE_FORMAT if is_chat:
            return _response_format(spec, dialect, api)
    raise RequestError(
        f"{api} cannot constrain completions of text; use a chat model, select(...), or a backend "
        "that can: Engine, or RuntimeEndpoint with its server",
        param="constraint",
    )


def _check_whitespace(spec: ConstraintSpec, dialect: Dialect, api: str) -> None:
    if spec.whitespace is Whitespace.BOUNDED and spec.whitespace_pattern is None:
        return
    is_told = dialect.constraint_fields is ConstraintFields.STRUCTURED_OUTPUTS
    if not is_told or spec.whitespace is Whitespace.SPACED:
        raise RequestError(
            f"{api} cannot be told where JSON has whitespace, or not so; leave whitespace out",
            param="constraint",
        )


def _response_format(spec: ConstraintSpec, dialect: Dialect, api: str) -> Constrained:
    answer = JsonFormat.of(spec, api=api, has_patterns=dialect.is_openai)
    return Constrained({"response_format": _json_schema(answer.schema)}, answer)


def _json_schema(schema: Any) -> dict[str, Any]:
    described = {"name": "answer", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": described}


def _structured_outputs(spec: ConstraintSpec, api: str) -> dict[str, Any]:
    fields: dict[str, Any]
    match spec.kind:
        case ConstraintKind.JSON_SCHEMA:
            fields = {"json": spec.text}
        case ConstraintKind.REGEX:
            fields = {"regex": spec.text}
        case ConstraintKind.CHOICE:
            fields = {"choice": json.loads(spec.text)}
        case ConstraintKind.LARK | ConstraintKind.EBNF:
            fields = {"grammar": spec.text}
        case ConstraintKind.STRUCTURAL_TAG:
            fields = {"structural_tag": spec.text}
    if spec.whitespace is Whitespace.COMPACT:
        fields["disable_any_whitespace"] = True
    if spec.whitespace_pattern is not None:
        fields["whitespace_pattern"] = spec.whitespace_pattern
    if spec.backend is not None:
        fields["backend"] = spec.backend
    return fields


def _sglang_fields(spec: ConstraintSpec, api: str, *, is_chat: bool) -> dict[str, Any]:
    match spec.kind:
        case ConstraintKind.JSON_SCHEMA if is_chat:
            return {"response_format": _json_schema(json.loads(spec.text))}
        case ConstraintKind.JSON_SCHEMA:
            return {"json_schema": spec.text}
        case ConstraintKind.REGEX:
            return {"regex": spec.text}
        case ConstraintKind.CHOICE:
            choices = json.loads(spec.text)
            return {"regex": f"({'|'.join(map(re.escape, choices))})"}
        case ConstraintKind.EBNF:
            return {"ebnf": spec.text}
        case ConstraintKind.STRUCTURAL_TAG if is_chat:
            return {"response_format": json.loads(spec.text)}
    raise RequestError(
        f"{api} runs SGLang, which takes no {spec.kind} here; give a regex or a grammar in EBNF",
        param="constraint",
    )
