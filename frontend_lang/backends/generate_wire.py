"""A call as a body of `/generate`, and what comes back as answers: SGLang's wire, and ours.

Knows no connection.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Protocol

from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt, TokenIds
from sapwood.frontend_lang.backends.role_formats import RoleTexts, written
from sapwood.frontend_lang.options import CONSTRAINTS, OPTION_NAMES, given
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import EngineError, RequestError
from sapwood.runtime.hints import Hints

# Fields of `sampling_params` that are called otherwise than our options, and those that are not.
_RENAMED: Mapping[str, str] = MappingProxyType(
    {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
)
_OPTION_BY_FIELD = MappingProxyType({theirs: ours for ours, theirs in _RENAMED.items()})
_SAME = (
    "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "logit_bias",
)  # fmt: skip
_BESIDE = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
# Where SGLang takes constraints.
_FIELD_OF_KIND: Mapping[ConstraintKind, str] = MappingProxyType(
    {
        ConstraintKind.JSON_SCHEMA: "json_schema",
        ConstraintKind.REGEX: "regex",
        ConstraintKind.EBNF: "ebnf",
        ConstraintKind.STRUCTURAL_TAG: "structural_tag",
    }
)


class Wire(Protocol):
    """How one kind of server is asked."""

    def prompt(self, prompt: Prompt) -> dict[str, Any]:
        """The fields that say what is continued. Raises RequestError."""
        ...

    def constraint(self, spec: ConstraintSpec) -> dict[str, Any]:
        """Fields of `sampling_params` that say it. Raises RequestError where there are none."""
        ...

    def asked(self, call: Call) -> dict[str, Any]:
        """Fields that only this kind of server knows. Raises RequestError for what it cannot do."""
        ...

    def token_ids(self, result: Mapping[str, Any]) -> TokenIds | None:
        """Those of a finished answer's text."""
        ...


class SapwoodWire:
    """Our own server: token ids both ways."""

    def prompt(self, prompt: Prompt) -> dict[str, Any]:
        assert prompt.token_ids is not None, "a program with an encoder has tokens"
        return {"input_ids": list(prompt.token_ids)}

    def constraint(self, spec: ConstraintSpec) -> dict[str, Any]:
        return {}  # it goes as it is: see `asked`

    def asked(self, call: Call) -> dict[str, Any]:
        asked: dict[str, Any] = {"text_ids": True} | asked_hints(call.hints)
        if call.constraint is not None:
            asked["constraint"] = call.constraint.as_json()
        if call.separate_reasoning:
            asked["separate_reasoning"] = call.reasoning_type or True
        return {"sapwood": asked}

    def token_ids(self, result: Mapping[str, Any]) -> TokenIds | None:
        return tuple(result["sapwood"]["text_ids"])


class SGLangWire:
    """SGLang's native API: text both ways.

    Conversations are written as `around` says. `takes_seeds`: the server was started to heed them.
    """

    def __init__(self, around: RoleTexts | None, *, takes_seeds: bool) -> None:
        self._around = around
        self._takes_seeds = takes_seeds

    def prompt(self, prompt: Prompt) -> dict[str, Any]:
        return {"text": self.text(prompt)}

    def text(self, prompt: Prompt) -> str:
        return written(prompt.messages, self._around) if prompt.messages else prompt.text

    def constraint(self, spec: ConstraintSpec) -> dict[str, Any]:
        if spec.whitespace_pattern is not None or spec.backend is not None:
            raise RequestError(
                "SGLang takes a constraint's whitespace pattern and backend when it is started, "
                "not with a request; leave them out",
                param="constraint",
            )
        if spec.kind is ConstraintKind.CHOICE:
            return {"regex": _any_of(spec)}
        if spec.kind not in _FIELD_OF_KIND:
            raise RequestError(
                f"SGLang takes no constraint in the notation {spec.kind}; write it as EBNF, as a "
                "regex or as a JSON schema",
                param="grammar",
            )
        return {_FIELD_OF_KIND[spec.kind]: spec.text}

    def asked(self, call: Call) -> dict[str, Any]:
        if call.options.get("seed") is not None and not self._takes_seeds:
            raise RequestError(
                "this server takes a seed and does not heed it; start it with "
                "--enable-deterministic-inference, or leave seed out",
                param="seed",
            )
        return {}  # hints change no answer, so it may go without

    def token_ids(self, result: Mapping[str, Any]) -> TokenIds | None:
        return None


def asked_hints(hints: Hints) -> dict[str, Any]:
    """The field `hints` of our object, if there is something to say."""
    said = {
        field.name: value
        for field in fields(hints)
        if (value := getattr(hints, field.name)) is not None and value is not False
    }
    return {"hints": said} if said else {}


def generate_body(wire: Wire, prompt: Prompt, call: Call, *, stream: bool) -> dict[str, Any]:
    """The body of a request. Raises RequestError for what cannot be asked of this server."""
    options = given(call.options)
    unmade = [name for name in CONSTRAINTS if name in options]
    if unmade and call.constraint is None:
        raise RequestError(
            f"{unmade[0]} says what the answer must be, and the call has no constraint made of it",
            param=unmade[0],
        )
    if stream and (options.get("n") or 1) != 1:
        raise RequestError(
            f"n is {options.get('n')}, and one answer is streamed at a time; leave n out, or do "
            "not stream",
            param="n",
        )
    values: Mapping[str, Any] = options
    sampling = {name: values[name] for name in _SAME if name in values}
    sampling |= {theirs: values[ours] for ours, theirs in _RENAMED.items() if ours in values}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {
            str(token): bias for token, bias in sampling["logit_bias"].items()
        }
    if call.constraint is not None:
        sampling |= wire.constraint(call.constraint)
    beside = {name: values[name] for name in _BESIDE if name in values}
    return {
        **wire.prompt(prompt),
        "sampling_params": sampling,
        "stream": stream,
        **beside,
        **wire.asked(call),
    }


@contextmanager
def in_options_words() -> Iterator[None]:
    """Turns a RequestError about a field of the body into one about the option."""
    try:
        yield
    except RequestError as error:
        field = (error.param or "").removeprefix("sampling_params.")
        option = _OPTION_BY_FIELD.get(field, field)
        if option not in OPTION_NAMES or option == error.param:
            raise
        message = re.sub(rf"\b{field}\b", option, str(error))
        raise type(error)(message, param=option) from error


def whole_answer(wire: Wire, result: Mapping[str, Any]) -> Answer:
    """What one result says in all. Raises EngineError for an answer that was cut off, or none."""
    try:
        return _read(wire, result)
    except (AttributeError, KeyError, TypeError) as error:
        raise EngineError(f"the server answered what is no answer: {str(result)[:300]}") from error


def _read(wire: Wire, result: Mapping[str, Any]) -> Answer:
    meta, text = result["meta_info"], result["text"]
    if not isinstance(text, str):
        raise TypeError("the text is none")
    kind = _finish_reason(meta)
    return Answer(
        text=text,
        reasoning=result.get("sapwood", {}).get("reasoning", ""),
        token_ids=None if kind is None else wire.token_ids(result),
        finish_reason=kind,
        meta=MappingProxyType(meta),
    )


def _finish_reason(meta: Mapping[str, Any]) -> str | None:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind == "abort":
        told = reason.get("message") if isinstance(reason, dict) else None
        raise EngineError(f"the server gave the request up: {told or 'it does not say why'}")
    return kind


def _any_of(spec: ConstraintSpec) -> str:
    """A pattern for one of the choices, in a notation that all regex engines share."""
    special = frozenset(r"\.^$*+?{}[]()|/-")
    escaped = (
        "".join(f"\\{c}" if c in special else c for c in choice) for choice in json.loads(spec.text)
    )
    return f"({'|'.join(escaped)})"
