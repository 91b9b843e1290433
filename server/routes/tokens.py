"""Text to tokens and back, and conversations as text: nothing here runs the model.

`/tokenize` and `/detokenize` take the bodies of vLLM and of SGLang, and answer with the fields of
both. All of it is done on threads.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sapwood.runtime.chat import Chat, ChatOptions, Message
from sapwood.runtime.role_text import role_text
from sapwood.server.body import request_body
from sapwood.server.engine import ServingTokenizer
from sapwood.server.routes.replies import json_reply
from sapwood.server.schemas import in_callers_words
from sapwood.server.schemas_openai import ChatRequest
from sapwood.server.schemas_tokens import (
    DetokenizeRequest,
    Form,
    RoleTextRequest,
    TokenizeRequest,
)
from sapwood.server.serving import Serving, ServingDep

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    summary="Token ids of texts, of a conversation, or of pieces",
    openapi_extra=request_body(TokenizeRequest),
)
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: Request, serving: ServingDep) -> Response:
    """`token_strs`, if asked for, are the tokens as a person may read them."""
    body = await serving.read(request, TokenizeRequest)
    serving.model_name(body.model)
    return await _reply(lambda: _tokenized(serving, body))


@router.post(
    "/detokenize",
    summary="The text of token ids",
    openapi_extra=request_body(DetokenizeRequest),
)
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: Request, serving: ServingDep) -> Response:
    """`prompt` is the text with special tokens, `text` without them unless they are asked for."""
    body = await serving.read(request, DetokenizeRequest)
    serving.model_name(body.model)
    lists, is_single = body.lists(serving.engine.info.vocab_size)

    def work() -> dict[str, Any]:
        skips = body.skip_special_tokens is not False
        prompts, texts = _texts(serving, lists, False), _texts(serving, lists, skips)
        return {"prompt": prompts[0], "text": texts[0]} if is_single else {
            "prompt": prompts, "text": texts
        }  # fmt: skip

    return await _reply(work)


@router.post(
    "/v1/chat/completions/render",
    summary="A conversation as the text that the model is given",
    openapi_extra=request_body(ChatRequest),
)
async def render(request: Request, serving: ServingDep) -> Response:
    """Takes the body of a chat request and runs nothing."""
    body = await serving.read(request, ChatRequest)
    serving.model_name(body.model)
    chat = body.chat()
    return await _reply(lambda: {"text": serving.engine.tokenizer.render_chat(chat).text})


@router.post(
    "/role_text",
    summary="What the chat template writes around the last of some messages",
    openapi_extra=request_body(RoleTextRequest),
)
async def around_message(request: Request, serving: ServingDep) -> Response:
    """`prefix` stands before the last message's content, `suffix` after it. An assistant's prefix
    is the generation prompt."""
    body = await serving.read(request, RoleTextRequest)
    serving.model_name(body.model)

    def rendered(messages: list[Message], opens: bool) -> str:
        chat = Chat(messages, ChatOptions(add_generation_prompt=opens))
        return serving.engine.tokenizer.render_chat(chat).text

    def work() -> dict[str, Any]:
        with in_callers_words({"messages": "roles"}):
            prefix, suffix = role_text(rendered, body.roles)
        return {"prefix": prefix, "suffix": suffix}

    return await _reply(work)


async def _reply(work: Callable[[], dict[str, Any]]) -> Response:
    """The answer that `work` makes on a thread. Raises what it raises."""
    return await asyncio.to_thread(lambda: json_reply(work(), f"tokens-{uuid4().hex}"))


def _tokenized(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = serving.engine.tokenizer
    ids = _token_ids(tokenizer, body)
    counts = [len(tokens) for tokens in ids]
    strings = None
    if body.return_token_strs:
        strings = [[tokenizer.token_text(token) for token in tokens] for tokens in ids]
    is_single = body.is_single
    return {
        "tokens": ids[0] if is_single else ids,
        "count": counts[0] if is_single else counts,
        "max_model_len": serving.engine.info.max_model_len,
        "token_strs": strings and (strings[0] if is_single else strings),
    }


def _token_ids(tokenizer: ServingTokenizer, body: TokenizeRequest) -> list[list[int]]:
    """Those of each text. Raises ApiError, RequestError."""
    match form := body.form():
        case Form.PROMPT:
            special = body.add_special_tokens is not False
            arrays = tokenizer.encode_batch(body.prompts(), add_special_tokens=special)
        case Form.MESSAGES:
            arrays = [tokenizer.encode_chat(body.chat())]
        case Form.PIECES | Form.BATCH:
            # What a tokenizer calls what it was given.
            with in_callers_words({"messages": form, "prompt": form}):
                arrays = [
                    tokenizer.encode_pieces(
                        [(piece.text, bool(piece.is_control)) for piece in text.pieces],
                        at_start=bool(text.at_start),
                    )
                    for text in body.texts_in_pieces()
                ]
    return [array.tolist() for array in arrays]


def _texts(serving: Serving, lists: Sequence[Sequence[int]], skips_special: bool) -> list[str]:
    decode = serving.engine.tokenizer.decode
    return [decode(ids, skip_special_tokens=skips_special) for ids in lists]
