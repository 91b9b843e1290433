"""llama.cpp's server, in process through xllamacpp, for `bench/peers.py`.

python llamacpp_engine.py --model FILE.gguf --slots 8 --kv-type f16 --threads 2
"""

import argparse
import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import xllamacpp  # type: ignore[import-not-found]
from driver import Answer, Request, serve

SLOT_LEN = 1408
"""Tokens of context in a slot; the longest request of any workload fits."""


class LlamaCppEngine:
    """One HTTP connection and one thread for each request, as a client of a server has them."""

    def __init__(self, model: str, num_slots: int, kv_type: str, num_threads: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = num_slots
        params.n_ctx = num_slots * SLOT_LEN
        params.cpuparams.n_threads = num_threads
        params.cpuparams_batch.n_threads = num_threads
        params.n_threads_http = 128  # more than ever wait at once
        params.port = 0
        params.cache_prompt = True
        params.endpoint_slots = False
        types = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "f32": xllamacpp.ggml_type.GGML_TYPE_F32}
        params.cache_type_k = types[kv_type]
        params.cache_type_v = types[kv_type]
        self._settings = {
            "n_parallel": num_slots,
            "n_ctx": num_slots * SLOT_LEN,
            "cache_type": kv_type,
            "n_batch": params.n_batch,
            "n_ubatch": params.n_ubatch,
            "cache_prompt": True,
            "cache_ram_mib": params.cache_ram_mib,
            "num_threads": num_threads,
        }
        self._server = xllamacpp.Server(params)
        self._address = self._server.listening_address.removeprefix("http://")
        self._done: queue.SimpleQueue[tuple[int, Answer | Exception]] = queue.SimpleQueue()
        self._connections: dict[threading.Thread, http.client.HTTPConnection] = {}
        self._generation = 0  # of calls; raised by `cancel`, so that late answers are known

    def describe(self) -> dict[str, Any]:
        return {
            "versions": {"xllamacpp": xllamacpp.__version__},
            "settings": self._settings | {"system": xllamacpp.get_system_info().strip()},
        }

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            connection = http.client.HTTPConnection(self._address)
            thread = threading.Thread(
                target=self._ask, args=(connection, request, self._generation), daemon=True
            )
            self._connections[thread] = connection
            thread.start()

    def wait(self, deadline: float) -> list[Answer]:
        while True:
            try:
                timeout = max(0.0, deadline - time.perf_counter())
                generation, answer = self._done.get(timeout=timeout)
            except queue.Empty:
                return []
            if generation != self._generation:
                continue
            if isinstance(answer, Exception):
                raise answer
            return [answer]

    def cancel(self) -> None:
        """The server ends a request whose connection is closed."""
        self._generation += 1
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError, AttributeError):  # not connected, or gone meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._connections):
            thread.join()

    def _ask(
        self, connection: http.client.HTTPConnection, request: Request, generation: int
    ) -> None:
        try:
            self._done.put((generation, _complete(connection, request)))
        except Exception as error:
            self._done.put((generation, error))
        finally:
            connection.close()
            del self._connections[threading.current_thread()]


def _complete(connection: http.client.HTTPConnection, request: Request) -> Answer:
    """Streamed only where the first token is timed: each event costs the client something."""
    body = {
        "prompt": request.prompt_ids,
        "n_predict": request.max_tokens,
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": True,
        "return_tokens": True,
        "stream": request.is_timed,
    }
    connection.request(
        "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
    if not request.is_timed:
        tokens = json.loads(response.read())["tokens"]
        return Answer(request.key, tokens, time.perf_counter())
    tokens = []
    first_token_time = None
    finish_time = 0.0
    for line in response:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if event["stop"]:
            break
        tokens += event["tokens"]
        finish_time = time.perf_counter()
        first_token_time = first_token_time or finish_time
    return Answer(request.key, tokens, finish_time, first_token_time)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--kv-type", choices=["f16", "f32"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(
        lambda: LlamaCppEngine(
            arguments.model, arguments.slots, arguments.kv_type, arguments.threads
        )
    )


if __name__ == "__main__":
    main()
