"""transformers' two ways to generate, for `bench/peers.py`.

python transformers_engine.py --model FOLDER --batching continuous --threads 2
"""

import argparse
import queue
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from driver import Answer, PeerEngine, Request, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

NO_TOKEN = -1


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    names = ("transformers", "torch")
    return {"versions": {name: version(name) for name in names}, "settings": settings}


class ContinuousEngine:
    """`generate_batch`'s manager, which runs its loop on a thread and answers through a queue."""

    SETTINGS = {
        "page_size": 32,
        "num_blocks": 1024,
        "max_batch_tokens": 1024,
        "allow_block_sharing": True,
    }

    def __init__(self, model: Any) -> None:
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN),
            continuous_batching_config=ContinuousBatchingConfig(**self.SETTINGS),
        )
        self._manager.start()
        self._last_id = 0
        self._unfinished: dict[str, Request] = {}

    def describe(self) -> dict[str, Any]:
        return describe({"batching": "continuous"} | self.SETTINGS)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._last_id += 1
            name = str(self._last_id)
            self._unfinished[name] = request
            self._manager.add_request(
                request.prompt_ids,
                request_id=name,
                max_new_tokens=request.max_tokens,
                record_timestamps=request.is_timed,
                eos_token_id=NO_TOKEN,
            )

    def wait(self, deadline: float) -> list[Answer]:
        while (timeout := deadline - time.perf_counter()) > 0:
            result = self._manager.get_result(timeout=min(timeout, 1.0))
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            if result.request_id not in self._unfinished:
                continue  # of a job that was cut off
            if result.error is not None:
                raise RuntimeError(result.error)
            now = time.perf_counter()
            request = self._unfinished.pop(result.request_id)
            times = result.timestamps
            return [Answer(request.key, result.generated_tokens, now, times[0] if times else None)]
        return []

    def cancel(self) -> None:
        for name in self._unfinished:
            self._manager.cancel_request(name)
        self._unfinished.clear()


class StaticEngine:
    """`generate` on padded batches, first come, first served; a batch ends as a whole."""

    MAX_BATCH_SIZE = 32

    def __init__(self, model: Any) -> None:
        self._model = model
        self._pending: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def describe(self) -> dict[str, Any]:
        return describe({"batching": "static", "max_batch_size": self.MAX_BATCH_SIZE})

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._pending.put(request)

    def wait(self, deadline: float) -> list[Answer]:
        batch: list[Request] = []
        while len(batch) < self.MAX_BATCH_SIZE and not self._pending.empty():
            batch.append(self._pending.get())
        longest = max(len(request.prompt_ids) for request in batch)
        prompts = torch.zeros(len(batch), longest, dtype=torch.int64)
        # The end token is the padding token too, so the mask cannot be guessed from the ids.
        mask = torch.zeros_like(prompts)
        for row, request in enumerate(batch):
            prompts[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        clock = _FirstTokenClock()
        max_tokens = max(request.max_tokens for request in batch)
        generated = self._model.generate(
            prompts,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
            ),
            streamer=clock if len(batch) == 1 else None,
            stopping_criteria=StoppingCriteriaList([_Deadline(deadline)]),
        )
        now = time.perf_counter()
        if now > deadline:
            return []
        return [
            Answer(request.key, row[longest:][: request.max_tokens], now, clock.first_token_time)
            for request, row in zip(batch, generated.tolist(), strict=True)
        ]

    def cancel(self) -> None:
        while not self._pending.empty():
            self._pending.get()


class _FirstTokenClock(BaseStreamer):  # type: ignore[misc]  # the base has no types
    """`generate` puts the prompt, then each token."""

    def __init__(self) -> None:
        self.first_token_time: float | None = None
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.first_token_time = time.perf_counter()

    def end(self) -> None:
        pass


class _Deadline(StoppingCriteria):  # type: ignore[misc]  # the base has no types
    """Looked at between steps, so that a long prefill is not interrupted."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        late = time.perf_counter() > self._deadline
        return torch.full((input_ids.shape[0],), late, dtype=torch.bool)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batching", choices=["continuous", "static"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def make_engine() -> PeerEngine:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        return (
            ContinuousEngine(model) if arguments.batching == "continuous" else StaticEngine(model)
        )

    serve(make_engine)


if __name__ == "__main__":
    main()
