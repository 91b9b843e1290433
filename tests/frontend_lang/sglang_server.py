"""A server that speaks SGLang's native API, as version 0.5 does: text in, text and ids out.

Tokens are single bytes, except that the letters "th" are one token; answers are canned.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

TH = 256  # one token for two letters
ANSWER = "Hello, wörld!"


def cut(text: str) -> list[int]:
    ids, data = [], text.encode()
    while data:
        if data.startswith(b"th"):
            ids.append(TH)
            data = data[2:]
        else:
            ids.append(data[0])
            data = data[1:]
    return ids


def logprob(token: int) -> float:
    return -token / 100


class SGLangLike:
    """`bodies` are those of `/generate`; `left` counts clients that closed a stream early."""

    def __init__(
        self,
        *,
        model: str = "org/Qwen3-0.6B",
        answer: str = ANSWER,
        delay: float = 0.0,
        info_path: str = "/get_model_info",
        segments: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        self.model, self.answer, self.delay, self.segments = model, answer, delay, segments
        self.bodies: list[dict[str, Any]] = []
        self.num_flushes = self.left = 0
        self.abort: str | None = None
        self.app = FastAPI()
        self.app.get(info_path)(self.model_info)
        self.app.get("/get_server_info")(self.server_info)
        self.app.post("/flush_cache")(self.flush_cache)
        self.app.post("/generate")(self.generate)

    async def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model,
            "tokenizer_path": self.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
        }

    async def server_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model,
            "version": "0.5.10",
            "enable_deterministic_inference": self.deterministic,
            "internal_states": [{}],
        }

    async def flush_cache(self) -> Response:
        self.num_flushes += 1
        return PlainTextResponse("Cache flushed.\n")

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if "bad" in body.get("text", ""):
            error = {"error": {"message": "the prompt is bad", "type": "BadRequestError"}}
            return JSONResponse(error, status_code=400)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        if isinstance(body["text"], list):
            return JSONResponse([self._result(text, body, self.answer) for text in body["text"]])
        n = body["sampling_params"].get("n", 1)
        if n > 1:
            return JSONResponse([self._result(body["text"], body, self.answer) for _ in range(n)])
        return JSONResponse(self._result(body["text"], body, self.answer))

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        data, said = self.answer.encode(), ""
        try:
            for end in range(1, len(data) + 1):
                await asyncio.sleep(self.delay)
                result = self._result(body["text"], body, data[:end].decode(errors="replace"))
                if end < len(data):
                    result["meta_info"]["finish_reason"] = None
                if self.segments:
                    result["text"], said = result["text"][len(said) :], result["text"]
                yield f"data: {json.dumps(result)}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise

    def _result(self, text: str, body: dict[str, Any], answer: str) -> dict[str, Any]:
        ids = cut(text)
        generated = [] if body["sampling_params"].get("max_new_tokens") == 0 else cut(answer)
        reason: dict[str, Any] = {"type": "stop", "matched": 2}
        if self.abort is not None:
            reason = {"type": "abort", "message": self.abort}
        meta: dict[str, Any] = {
            "id": "a0",
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "completion_tokens": len(generated),
            "cached_tokens": 0,
            "e2e_latency": 0.01,
        }
        if body.get("return_logprob"):
            start = max(0, body.get("logprob_start_len", -1))
            # The first position that is asked about has no log-probability.
            meta["input_token_logprobs"] = [
                [logprob(token) if i else None, token, None] for i, token in enumerate(ids[start:])
            ]
            meta["output_token_logprobs"] = [[logprob(token), token, None] for token in generated]
        shown = "" if not generated else answer
        return {"text": shown, "output_ids": generated, "meta_info": meta}
