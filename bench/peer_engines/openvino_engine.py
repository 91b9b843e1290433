"""OpenVINO GenAI's continuous batching for `bench/peers.py`.

python openvino_engine.py --model FOLDER --precision float32 --cache-gb 2 --threads 2
"""

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
from driver import Answer, Request, serve


class OpenVinoEngine:
    """The client drives the steps and reads what each request got."""

    def __init__(self, model: str, *, is_int8: bool, cache_gb: int, num_threads: int) -> None:
        self._is_int8 = is_int8
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 1024
        scheduler.max_num_seqs = 128
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "u8" if is_int8 else "f32",
        }
        self._settings = properties | {
            "cache_size": cache_gb,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "dynamic_split_fuse": True,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            model, scheduler_config=scheduler, device="CPU", properties=properties
        )
        self._last_id = 0
        self._unfinished: list[_Unfinished] = []

    def describe(self) -> dict[str, Any]:
        names = ("openvino", "openvino-genai")
        return {
            "versions": {name: version(name) for name in names},
            "settings": self._settings,
            "activations": "int8" if self._is_int8 and _has_vnni() else "float32",
        }

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens = request.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            self._last_id += 1
            prompt = ov.Tensor(np.array([request.prompt_ids], dtype=np.int64))
            handle = self._pipeline.add_request(self._last_id, prompt, config)
            self._unfinished.append(_Unfinished(request, handle))

    def wait(self, deadline: float) -> list[Answer]:
        answers: list[Answer] = []
        while not answers and time.perf_counter() < deadline:
            self._pipeline.step()
            now = time.perf_counter()
            answers = [answer for one in self._unfinished if (answer := one.read(now)) is not None]
            self._unfinished = [one for one in self._unfinished if not one.is_done]
        return answers

    def cancel(self) -> None:
        for one in self._unfinished:
            one.handle.cancel()
        self._unfinished.clear()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class _Unfinished:
    """A request in flight. `read` gives its answer once it is whole."""

    def __init__(self, request: Request, handle: Any) -> None:
        self.handle = handle
        self._request = request
        self._token_ids: list[int] = []
        self._first_token_time: float | None = None

    @property
    def is_done(self) -> bool:
        return len(self._token_ids) >= self._request.max_tokens

    def read(self, now: float) -> Answer | None:
        while self.handle.can_read():
            for output in self.handle.read().values():
                self._token_ids += output.generated_ids
            self._first_token_time = self._first_token_time or now
        if not self.is_done:
            return None
        return Answer(self._request.key, self._token_ids, now, self._first_token_time)


def _has_vnni() -> bool:
    """Whether int8 weights meet activations quantised on the way; else these stay float32."""
    return "vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=["float32", "int8"], required=True)
    parser.add_argument("--cache-gb", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(
        lambda: OpenVinoEngine(
            arguments.model,
            is_int8=arguments.precision == "int8",
            cache_gb=arguments.cache_gb,
            num_threads=arguments.threads,
        )
    )


if __name__ == "__main__":
    main()
