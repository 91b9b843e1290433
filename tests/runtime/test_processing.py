"""Conversations with tools, from the input to the request."""

from typing import Any

import pytest
from tokenizers import AddedToken

from sapwood.runtime.chat import Chat, ChatOptions
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import RequestError
from sapwood.runtime.processing import InputProcessor
from sapwood.runtime.request import Request
from sapwood.runtime.request_limits import RequestLimits
from sapwood.runtime.sampling_params import SamplingParams
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.tools import TOOL_FORMATS
from tests.runtime.tiny_tokenizers import TEMPLATE, byte_level

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
KNOWS_TOOLS = TEMPLATE + "{{ tools | tojson if tools }}"


def inputs(tool_format: str, *, special: bool = True) -> InputProcessor:
    backend = byte_level()
    marker = AddedToken("<tool_call>", special=special, normalized=False)
    (backend.add_special_tokens if special else backend.add_tokens)([marker])
    tokenizer = Tokenizer(
        backend,
        special_tokens={},
        eos_token_ids=(0,),
        chat_template=TEMPLATE if tool_format == "generic" else KNOWS_TOOLS,
        tool_format=TOOL_FORMATS[tool_format],
    )
    limits = RequestLimits(vocab_size=tokenizer.vocab_size, max_num_seqs=4)
    return InputProcessor(tokenizer, max_model_len=4096, limits=limits, namespace=())


def request(made: InputProcessor, *, sampling: Any = None, **options: Any) -> Request:
    chat = Chat(MESSAGES, ChatOptions(**options))
    return made.process(chat, sampling, caller_id=None, now=0.0)


@pytest.mark.parametrize("tool_format", ["generic", "hermes"])
def test_a_conversation_with_tools_is_constrained_and_read(tool_format: str) -> None:
    asked = request(inputs(tool_format), tools=TOOLS)
    constraint = asked.sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.STRUCTURAL_TAG
    assert asked.answer_format is not None


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_to_call_nothing_is_asked_of_the_answer(options: Any) -> None:
    schema = SamplingParams(constraint=ConstraintSpec.json_schema(True))
    for sampling in (SamplingParams(), schema):
        asked = request(inputs("hermes"), sampling=sampling, **options)
        assert asked.sampling == sampling
        assert asked.answer_format is None and not asked.visible_tokens


def test_a_marker_is_visible_where_it_is_a_special_token() -> None:
    asked = request(inputs("hermes"), tools=TOOLS)
    assert list(asked.visible_tokens.values()) == [b"<tool_call>"]
    assert not request(inputs("hermes", special=False), tools=TOOLS).visible_tokens
    assert not request(inputs("generic"), tools=TOOLS).visible_tokens


def test_a_call_that_has_to_be_and_a_constraint_are_refused_together() -> None:
    sampling = SamplingParams(constraint=ConstraintSpec.json_schema(True))
    with pytest.raises(RequestError) as refusal:
        request(inputs("hermes"), sampling=sampling, tools=TOOLS, tool_choice="required")
    assert refusal.value.param == "constraint"


def test_a_conversation_that_is_only_scored_is_not_constrained() -> None:
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert request(inputs("hermes"), sampling=score, tools=TOOLS).sampling == score


@pytest.mark.parametrize("tool_format", ["generic", "hermes"])
def test_an_explanation_counts_the_tokens_of_the_tools(tool_format: str) -> None:
    made = inputs(tool_format)
    with_tools = made.explain(Chat(MESSAGES, ChatOptions(tools=TOOLS))).num_tokens
    assert with_tools == request(made, tools=TOOLS).num_prompt_tokens
    assert with_tools > made.explain(MESSAGES).num_tokens
