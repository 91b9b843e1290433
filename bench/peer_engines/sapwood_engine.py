"""Sapwood for `bench/peers.py`, over its asyncio engine.

python sapwood_engine.py --model smollm2 --quantize int8 --threads 2
"""

import argparse
import asyncio
import platform
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import torch
from driver import Answer, Request, serve

import sapwood
from sapwood import AsyncEngine, SamplingParams


class SapwoodEngine:
    """Requests that are submitted together are one call of the engine, which streams them all."""

    def __init__(self, model: str, quantize: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._engine = AsyncEngine(model, quantize=quantize)
        self._quantize = quantize
        self._loop = asyncio.new_event_loop()
        self._calls: set[asyncio.Task[None]] = set()
        self._done: asyncio.Queue[Answer | Exception] = asyncio.Queue()

    def describe(self) -> dict[str, Any]:
        return {
            "versions": {
                "sapwood": sapwood.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "kv_cache": self._engine.info.kv_dtype,
            "settings": {"quantize": self._quantize, "num_threads": torch.get_num_threads()},
        }

    def submit(self, requests: Sequence[Request]) -> None:
        self._calls.add(self._loop.create_task(self._answer(requests)))

    def wait(self, deadline: float) -> list[Answer]:
        return self._loop.run_until_complete(self._take(deadline))

    def cancel(self) -> None:
        self._loop.run_until_complete(self._cancel())

    async def _answer(self, requests: Sequence[Request]) -> None:
        token_ids: list[list[int]] = [[] for _ in requests]
        first_token_times: list[float | None] = [None for _ in requests]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            for request in requests
        ]
        prompts = [request.prompt_ids for request in requests]
        try:
            async with aclosing(self._engine.stream_all(prompts, sampling)) as pieces:
                async for index, piece in pieces:
                    now = time.perf_counter()
                    token_ids[index] += piece.outputs[0].token_ids
                    if first_token_times[index] is None:
                        first_token_times[index] = now
                    if piece.finished:
                        key = requests[index].key
                        self._done.put_nowait(
                            Answer(key, token_ids[index], now, first_token_times[index])
                        )
        except Exception as error:
            self._done.put_nowait(error)

    async def _take(self, deadline: float) -> list[Answer]:
        """What is done, at least one; empty at the deadline. Raises what a call raised."""
        try:
            async with asyncio.timeout(deadline - time.perf_counter()):
                taken = [await self._done.get()]
        except TimeoutError:
            return []
        while not self._done.empty():
            taken.append(self._done.get_nowait())
        self._calls = {call for call in self._calls if not call.done()}
        answers = []
        for item in taken:
            if isinstance(item, Exception):
                raise item
            answers.append(item)
        return answers

    async def _cancel(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._calls.clear()
        while not self._done.empty():
            self._done.get_nowait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantize", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(lambda: SapwoodEngine(arguments.model, arguments.quantize, arguments.threads))


if __name__ == "__main__":
    main()
