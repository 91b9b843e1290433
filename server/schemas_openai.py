"""What `/v1/chat/completions` and `/v1/completions` take: OpenAI's fields, and some of ours."""

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.hints import Hints
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.server.body import checked
from sapwood.server.errors import ApiError
from sapwood.server.schemas import (
    Accepted,
    Int64,
    LogitBias,
    RequestId,
    Stop,
    Wire,
    refused,
    sampling_params,
)
from sapwood.server.schemas_constraints import OpenAIConstraintFields
from sapwood.server.schemas_sapwood import SapwoodFields, hints_of

MAX_MESSAGES = 65_536
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

_NO_FUNCTIONS = 'send tools: [{"type": "function", "function": {...}}] instead'
_NO_FUNCTION_CALL = 'send tool_choice instead: {"type": "function", "function": {"name": ...}}'
_NO_BEAMS = (
    "beam search is not served: its beams are ranked together at every step, and an answer would "
    "depend on the others; use best_of, or n with a temperature"
)
_ONLY_COMPLETIONS = "/v1/completions has it, conversations do not; use n, or prompt_logprobs"
_NO_BAD_WORDS = "words are not served; ban their tokens with banned_token_ids"
_NO_MEDIA = "only text is served; leave it out"
_NO_DOCUMENTS = "documents are not served; leave it out and quote them in a message"
_OWN_TEMPLATE = "conversations are rendered by the model's own template; leave it out"
_NOT_YET = "not served yet; leave it out"


class Lenient(BaseModel):
    """Base of parts that clients decorate freely: what is not known is dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ContentPart(Lenient):
    """One part of a message's content. Only text has a meaning here."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


def _only_text(part: ContentPart) -> ContentPart:
    if part.type not in ("text", "refusal"):
        raise PydanticCustomError("unsupported", "only text parts are served")
    if part.words is None:
        raise PydanticCustomError("missing_text", "a text part must have a text")
    return part


def _as_parts(value: Any, info: ValidationInfo) -> Any:
    """A string is one part. Only the assistant may say nothing (or have made tool calls only)."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    may_be_none = info.data.get("role", "assistant") == "assistant"
    if not isinstance(value, list) and not (value is None and may_be_none):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return value


_TEXT_OR_PARTS = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
)
_TOOL_CHOICE = WithJsonSchema(
    {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
)
Part = Annotated[ContentPart, AfterValidator(_only_text)]


class FunctionCall(Lenient):
    """What an assistant called. `arguments` are JSON as text, as answers have them."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCall(Lenient):
    """One call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _of_assistant(value: Any, info: ValidationInfo) -> Any:
    if value and info.data.get("role", "assistant") != "assistant":
        raise PydanticCustomError("tool_calls", "only an assistant's message has tool calls")
    return value


def _of_tool(value: Any, info: ValidationInfo) -> Any:
    if value is None and info.data.get("role") == "tool":
        raise PydanticCustomError("missing", "it says which call the message answers")
    return value


class Message(Lenient):
    """One turn of a conversation. `function_call` is the older form of one tool call."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        Annotated[list[Part], Field(fail_fast=True)] | None,
        BeforeValidator(_as_parts),
        _TEXT_OR_PARTS,
        Field(validate_default=True),
    ] = None
    name: str | None = None
    tool_call_id: Annotated[str | None, AfterValidator(_of_tool), Field(validate_default=True)] = (
        None
    )
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, AfterValidator(_of_assistant)] = None
    function_call: Annotated[FunctionCall | None, AfterValidator(_of_assistant)] = None
    audio: Annotated[Any, refused(_NO_MEDIA)] = None

    def plain(self) -> dict[str, Any]:
        """As the engine's chat templates take it."""
        plain = {
            "role": "tool" if self.role == "function" else self.role,
            "content": [{"type": "text", "text": part.words} for part in self.content or ()],
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()] or None,
        }
        if self.function_call is not None and not self.tool_calls:
            function = self.function_call.model_dump()
            plain["tool_calls"] = [{"type": "function", "function": function}]
        return {key: value for key, value in plain.items() if value is not None}


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Accepted = None
    continuous_usage_stats: Annotated[Any, refused(_NOT_YET, False)] = None


def _only_of_a_stream(options: StreamOptions, info: ValidationInfo) -> StreamOptions:
    if not info.data.get("stream"):
        raise PydanticCustomError("no_stream", "is only for stream: true; leave it out")
    return options


class OpenAIRequest(OpenAIConstraintFields):
    """What both endpoints take."""

    model: str | None = None  # None: the one that is served
    max_tokens: Int64 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, AfterValidator(_only_of_a_stream)] | None = None

    top_k: Int64 | None = None
    min_p: float | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: list[Int64] | None = None
    stop_regex: Stop = None
    ignore_eos: bool | None = None
    n: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: list[Int64] | None = None
    banned_token_ids: list[Int64] | None = None
    prompt_logprobs: Int64 | None = None
    prompt_logprobs_start: Int64 | None = None
    # Shorter than the rule allows: the answer's id has a prefix and may have a counter.
    request_id: Annotated[RequestId, Field(max_length=128)] | None = None

    sapwood: SapwoodFields | None = None

    user: Accepted = None
    use_beam_search: Annotated[Any, refused(_NO_BEAMS, False)] = None
    length_penalty: Annotated[Any, refused(_NO_BEAMS, 1)] = None
    early_stopping: Annotated[Any, refused(_NO_BEAMS, False)] = None
    bad_words: Annotated[Any, refused(_NO_BAD_WORDS, [])] = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def names(self) -> dict[str, str]:
        """The caller's words for ours, in what the engine says about the request."""
        return {} if self.constraint is None else {"constraint": self.constraint.path}

    def hints(self) -> Hints:
        """What the caller knows of the requests to come. Raises ApiError."""
        return hints_of(self.sapwood)

    def _sampling(self, names: dict[str, str], **values: Any) -> SamplingParams:
        common = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "stop_regex": self.stop_regex,
            "ignore_eos": self.ignore_eos,
            "n": self.n,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "banned_token_ids": self.banned_token_ids,
            "prompt_logprobs": self.prompt_logprobs,
            "prompt_logprobs_start": self.prompt_logprobs_start,
            "constraint": self.constraint and self.constraint.spec,
        }
        return sampling_params(self.names | names, common | values)


class FunctionName(Wire):
    class Function(Wire):
        name: str

    type: Literal["function"]
    function: Function


class AllowedTools(Wire):
    """A `tool_choice`: some of the request's tools, which may or have to be called."""

    class Choice(Wire):
        mode: Literal["auto", "required"]
        tools: Annotated[list[FunctionName], Field(min_length=1)]

    type: Literal["allowed_tools"]
    allowed_tools: Choice

    def among(self, tools: Sequence[Any]) -> list[Any]:
        """Those of the request's tools. Raises RequestError, ApiError."""
        names = [tool.name for tool in ChatOptions(tools=tools).known_tools]
        allowed = [tool.function.name for tool in self.allowed_tools.tools]
        for i, name in enumerate(allowed):
            if name not in names:
                known = ", ".join(names) or "none"
                raise ApiError(
                    400,
                    f"{reprlib.repr(name)} is no tool of this request ({known})",
                    param=f"tool_choice.allowed_tools.tools[{i}].function.name",
                )
        return [tool for tool, name in zip(tools, names, strict=True) if name in allowed]


class ChatRequest(OpenAIRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None

    best_of: Annotated[Any, refused(_ONLY_COMPLETIONS, 1)] = None
    echo: Annotated[Any, refused(_ONLY_COMPLETIONS, False)] = None
    metadata: Accepted = None
    store: Accepted = None
    service_tier: Accepted = None
    safety_identifier: Accepted = None
    prompt_cache_key: Accepted = None
    prompt_cache_options: Accepted = None
    prompt_cache_retention: Accepted = None
    prediction: Accepted = None

    tools: list[Any] | None = None
    tool_choice: Annotated[Any, _TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, refused(_NO_FUNCTIONS, [])] = None
    function_call: Annotated[Any, refused(_NO_FUNCTION_CALL, "none", "auto")] = None
    modalities: Annotated[Any, refused(_NO_MEDIA, ["text"])] = None
    audio: Annotated[Any, refused(_NO_MEDIA)] = None
    verbosity: Annotated[Any, refused(_NOT_YET, "medium")] = None
    moderation: Annotated[Any, refused(_NOT_YET)] = None
    web_search_options: Annotated[Any, refused(_NOT_YET)] = None
    documents: Annotated[Any, refused(_NO_DOCUMENTS, [])] = None
    chat_template: Annotated[Any, refused(_OWN_TEMPLATE)] = None

    max_reasoning_tokens: Int64 | None = None
    thinking_token_budget: Int64 | None = None  # the same, as vLLM calls it
    separate_reasoning: bool | None = None
    reasoning_effort: str | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        """Of its own, a conversation with tools has a constraint that they make."""
        names = {"constraint": "tools"} if self.tools else {}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.thinking_token_budget is not None:
            names["max_reasoning_tokens"] = "thinking_token_budget"
        return names | super().names

    def chat(self) -> Chat:
        """The conversation, and how to render it. Raises RequestError, ApiError."""
        tools, tool_choice = self._tools()
        return Chat(
            [message.plain() for message in self.messages],
            ChatOptions(
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=bool(self.continue_final_message),
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                chat_template_kwargs=self.chat_template_kwargs or {},
                turns_key=self._turns_key(),
                reasoning_effort=self.reasoning_effort,
                separate_reasoning=self.separate_reasoning is not False,
            ),
        )

    def _tools(self) -> tuple[Sequence[Any], Any]:
        """The tools that the model is told of, and the choice among them."""
        tools, choice = self.tools or (), self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return tools, choice
        allowed = checked(choice, AllowedTools, at=("tool_choice",))
        return allowed.among(tools), allowed.allowed_tools.mode

    def _turns_key(self) -> str:
        """Clients that tell their users apart have turns of their own for each."""
        keys = (self.prompt_cache_key, self.safety_identifier, self.user)
        return next((key for key in keys if isinstance(key, str)), "")

    def sampling(self) -> SamplingParams:
        """How to answer; without a limit, as far as the context goes. Raises ApiError."""
        return self._sampling(
            {},
            max_tokens=self._one_of("max_tokens", "max_completion_tokens"),
            max_reasoning_tokens=self._one_of("max_reasoning_tokens", "thinking_token_budget"),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )

    def _one_of(self, name: str, other_name: str) -> Any:
        """The value of a field that has two names."""
        value, other = getattr(self, name), getattr(self, other_name)
        if value is not None and other is not None and value != other:
            raise ApiError(
                400, f"{name} is {value} and {other_name} is {other}; give one of them", param=name
            )
        return value if other is None else other


class CompletionRequest(OpenAIRequest):
    """The body of `POST /v1/completions`. `prompt` is checked by `schemas.as_prompts`."""

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {"description": "a string, token ids, a list of strings or of lists of token ids"}
        ),
    ]
    logprobs: Int64 | None = None
    echo: bool | None = None
    best_of: Int64 | None = None

    suffix: Annotated[Any, refused(_NOT_YET, "")] = None

    def sampling(self) -> SamplingParams:
        """How to answer; without a limit, 16 tokens. Raises ApiError."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and prompt_logprobs is not None:
            raise ApiError(
                400,
                "echo has the prompt's log-probabilities where logprobs is given; leave out "
                "prompt_logprobs",
                param="prompt_logprobs",
            )
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            prompt_logprobs = self.logprobs or 0
        return self._sampling(
            {"top_logprobs": "logprobs"},
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs,
            best_of=self.best_of,
            prompt_logprobs=prompt_logprobs,
        )
