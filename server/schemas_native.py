"""What the native `/generate` takes: SGLang's request."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from pydantic import WithJsonSchema

from sapwood.runtime.sampling_params import SamplingParams
from sapwood.server.body import checked, json_path
from sapwood.server.connection import is_sound_id
from sapwood.server.engine import Prompt
from sapwood.server.errors import ApiError
from sapwood.server.schemas import (
    ID_RULE,
    Accepted,
    Int64,
    LogitBias,
    Stop,
    Wire,
    as_prompts,
    refused,
    sampling_params,
)
from sapwood.server.schemas_constraints import (
    GivenConstraint,
    NativeSamplingConstraintFields,
    only_constraint,
)
from sapwood.server.schemas_sapwood import Asked, NativeSapwoodFields

if TYPE_CHECKING:
    from sapwood.runtime.build import EngineInfo

_NO_MEDIA = "only text is served; leave it out"
_NO_SESSION = "sessions are not served; send the whole prompt, what was computed is found again"
_NO_BEAMS = (
    "beam search is not served: an answer would depend on the others of its beams; use n with a "
    "temperature"
)
_NOT_YET = "not served yet; leave it out"

# Our names and those of this endpoint, where they differ.
_NAMES: Mapping[str, str] = MappingProxyType(
    {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
)
_KINDS: Mapping[type, str] = MappingProxyType(
    {bool: "true or false", int: "a whole number", str: "a string", dict: "an object"}
)


class NativeSampling(NativeSamplingConstraintFields):
    """The value of `sampling_params`."""

    max_new_tokens: Int64 | None = 128  # null: as far as the context goes
    min_new_tokens: Int64 | None = None
    stop: Stop = None
    stop_token_ids: list[Int64] | None = None
    stop_regex: Stop = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: list[Int64] | None = None
    banned_token_ids: list[Int64] | None = None
    n: Int64 | None = None
    ignore_eos: bool | None = None
    sampling_seed: Int64 | None = None
    seed: Int64 | None = None

    skip_special_tokens: Annotated[Any, refused(_NOT_YET, True)] = None
    spaces_between_special_tokens: Accepted = None
    beam_width: Annotated[Any, refused(_NO_BEAMS, 1)] = None
    no_stop_trim: Annotated[Any, refused(_NOT_YET, False)] = None
    stream_interval: Annotated[Any, refused(_NOT_YET, 1)] = None
    custom_params: Annotated[Any, refused(_NOT_YET, {})] = None
    watermark: Annotated[Any, refused(_NOT_YET)] = None

    def sampling(
        self,
        at: str,
        *,
        logprobs: bool,
        top_logprobs: int,
        logprob_start: int,
        other_constraint: GivenConstraint | None = None,
    ) -> SamplingParams:
        """These options, which stand at `at` in the body. Raises ApiError.

        Prompt tokens are scored from `logprob_start` on, none if it is -1. `other_constraint` is
        said elsewhere in the body.
        """
        fields = (*NativeSampling.model_fields, *_NAMES)
        names = {field: f"{at}.{_NAMES.get(field, field)}" for field in fields}
        names |= {"top_logprobs": "top_logprobs_num", "logprobs": "return_logprob"}
        names |= {"prompt_logprobs_start": "logprob_start_len"}
        scores_prompt = logprobs and logprob_start >= 0
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise ApiError(
                400,
                f"seed is {self.seed} and sampling_seed is {self.sampling_seed}; give one of them",
                param=f"{at}.seed",
            )
        constraint = only_constraint(filter(None, (self.constraint(at), other_constraint)))
        if constraint is not None:
            names["constraint"] = constraint.path
        values = {
            "constraint": constraint and constraint.spec,
            "max_tokens": self.max_new_tokens,
            "min_tokens": self.min_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed if self.sampling_seed is None else self.sampling_seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "stop_regex": self.stop_regex,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "banned_token_ids": self.banned_token_ids,
            "n": self.n,
            "ignore_eos": self.ignore_eos,
            "logprobs": logprobs,
            # As SGLang does, without return_logprob the numbers say nothing.
            "top_logprobs": top_logprobs if logprobs else 0,
            "prompt_logprobs": top_logprobs if scores_prompt else None,
            "prompt_logprobs_start": logprob_start if scores_prompt else None,
        }
        return sampling_params(names, values)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _one_or_list(kind: str) -> WithJsonSchema:
    one = {"type": kind}
    return WithJsonSchema({"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]})


class GenerateRequest(Wire):
    """The body of `POST /generate`.

    A batch is a list of prompts; the fields that may differ within it then take a list as well.
    """

    text: Annotated[Any, WithJsonSchema({"description": "a string or a list of strings"})] = None
    input_ids: Annotated[
        Any, WithJsonSchema({"description": "token ids or a list of lists of token ids"})
    ] = None
    sampling_params: Annotated[Any, _one_or_list("object")] = None
    rid: Annotated[Any, _one_or_list("string")] = None
    return_logprob: Annotated[Any, _one_or_list("boolean")] = None
    logprob_start_len: Annotated[Any, _one_or_list("integer")] = None
    top_logprobs_num: Annotated[Any, _one_or_list("integer")] = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    sapwood: Annotated[Any, _one_or_list("object")] = None

    log_metrics: Accepted = None
    custom_labels: Accepted = None
    conversation_id: Accepted = None
    routing_key: Accepted = None

    no_logs: Annotated[Any, refused(_NOT_YET, False)] = None
    image_data: Annotated[Any, refused(_NO_MEDIA, [])] = None
    video_data: Annotated[Any, refused(_NO_MEDIA, [])] = None
    audio_data: Annotated[Any, refused(_NO_MEDIA, [])] = None
    input_embeds: Annotated[Any, refused(_NOT_YET)] = None
    token_ids_logprob: Annotated[Any, refused(_NOT_YET, [])] = None
    return_hidden_states: Annotated[Any, refused(_NOT_YET, False)] = None
    return_prompt_token_ids: Annotated[Any, refused(_NOT_YET, False)] = None
    lora_path: Annotated[Any, refused(_NOT_YET)] = None
    session_params: Annotated[Any, refused(_NO_SESSION, {})] = None
    session_id: Annotated[Any, refused(_NO_SESSION)] = None
    custom_logit_processor: Annotated[Any, refused(_NOT_YET)] = None
    priority: Annotated[Any, refused(_NOT_YET, 0)] = None
    extra_key: Annotated[Any, refused(_NOT_YET)] = None
    cache_salt: Annotated[Any, refused(_NOT_YET)] = None
    require_reasoning: Annotated[Any, refused(_NOT_YET, False)] = None
    max_thinking_tokens: Annotated[Any, refused(_NOT_YET)] = None

    @property
    def names(self) -> Mapping[str, str]:
        """The caller's words for ours, in what the engine says about the request."""
        prompt = "input_ids" if self.text is None else "text"
        names = {field: f"sampling_params.{field}" for field in NativeSampling.model_fields}
        return {
            **names,
            "prompt": prompt,
            "constraint": self._constraint_path(),
            "request_id": "rid",
            "top_logprobs": "top_logprobs_num",
            "prompt_logprobs": "top_logprobs_num",
            "prompt_logprobs_start": "logprob_start_len",
        }

    def _constraint_path(self) -> str:
        """Where the prompts' constraints are said; in a batch they may be of several fields."""
        paths = {
            f"{field}.{name}"
            for field, names in (
                ("sampling_params", tuple(NativeSamplingConstraintFields.model_fields)),
                ("sapwood", ("constraint",)),
            )
            for given in _as_list(getattr(self, field))
            for name in names
            if isinstance(given, dict) and given.get(name)
        }
        return paths.pop() if len(paths) == 1 else "sampling_params"

    def prompts(self, info: "EngineInfo") -> tuple[list[Prompt], bool]:
        """What to answer, and whether it is a single prompt. Raises ApiError."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give one of text and input_ids", param="text")
        field = "input_ids" if self.text is None else "text"
        prompts, single = as_prompts(getattr(self, field), field, info)
        if isinstance(prompts[0], str) != (field == "text"):
            what = "strings" if field == "text" else "token ids"
            raise ApiError(400, f"{field} must hold {what}", param=field)
        return prompts, single

    def sampling(self, asked: Sequence[Asked]) -> list[SamplingParams]:
        """How to answer each prompt; `asked` of it is the rest. Raises ApiError."""
        num_prompts = len(asked)
        wanted = self._per_prompt("return_logprob", bool, num_prompts)
        top = self._per_prompt("top_logprobs_num", int, num_prompts)
        starts = self.logprob_starts(num_prompts)
        result = []
        for i, raw in enumerate(self._per_prompt("sampling_params", dict, num_prompts)):
            at = self._place("sampling_params", i)
            options = checked(raw or {}, NativeSampling, at=at)
            sampling = options.sampling(
                json_path(at),
                logprobs=bool(wanted[i]),
                top_logprobs=top[i] or 0,
                logprob_start=starts[i],
                other_constraint=asked[i].constraint,
            )
            result.append(sampling)
        return result

    def asked_of_sapwood(self, num_prompts: int) -> list[Asked]:
        """What the object `sapwood` asks for each prompt. Raises ApiError."""
        result = []
        for i, raw in enumerate(self._per_prompt("sapwood", dict, num_prompts)):
            at = self._place("sapwood", i)
            fields = checked(raw or {}, NativeSapwoodFields, at=at)
            result.append(fields.asked(json_path(at)))
        return result

    def logprob_starts(self, num_prompts: int) -> list[int]:
        """The first prompt position to score, -1 for none. Raises ApiError."""
        given = self._per_prompt("logprob_start_len", int, num_prompts)
        starts = [-1 if start is None else start for start in given]
        if any(start < -1 for start in starts):
            raise ApiError(
                400,
                f"logprob_start_len is {str(min(starts))[:20]}; it must be a position, or -1",
                param="logprob_start_len",
            )
        return starts

    def request_ids(self, num_prompts: int) -> list[str]:
        """The caller's ids, or new ones; one id for a batch is told apart by a counter.

        Raises ApiError.
        """
        rids = self._per_prompt("rid", str, num_prompts)
        if not all(rid is None or is_sound_id(rid) for rid in rids):
            raise ApiError(400, f"rid {ID_RULE}", param="rid")
        if num_prompts > 1 and isinstance(self.rid, str):
            return [f"{rid}_{i}" for i, rid in enumerate(rids)]
        return [uuid4().hex if rid is None else rid for rid in rids]

    def _place(self, field: str, index: int) -> tuple[str | int, ...]:
        """Where in the body the field stands for one prompt."""
        return (field, index) if isinstance(getattr(self, field), list) else (field,)

    def _per_prompt(self, field: str, kind: type, num_prompts: int) -> list[Any]:
        """A field's value for each prompt."""
        value = getattr(self, field)
        values = value if isinstance(value, list) else [value] * num_prompts
        if len(values) != num_prompts:
            raise ApiError(
                400, f"{field} has {len(values)} entries for {num_prompts} prompts", param=field
            )
        if not set(map(type, values)) <= {kind, type(None)}:
            raise ApiError(400, f"{field} must be {_KINDS[kind]}, or a list of them", param=field)
        return values
