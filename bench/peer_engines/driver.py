"""Runs workloads on one engine, in the engine's own process and environment.

An adapter (the other files of this folder) wraps an engine as `PeerEngine` and calls `serve`;
`bench/peers.py` starts the adapter and talks to it over stdin and stdout, one JSON object a line.
Knows no engine, and imports the standard library only.

    -> {"op": "run", "job": {...}, "primed": false, "cut_off": 100.0}
    <- {"seconds": ..., "first_token_seconds": [...], "finish_seconds": [...], "token_ids": [...]}
    -> {"op": "exit"}

What an engine prints goes to stderr, never among the answers.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Request:
    """Greedy, past any end token. `is_timed` asks for the time of the first token."""

    key: int
    prompt_ids: list[int]
    max_tokens: int
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are `time.perf_counter()`'s, as the client saw them; the first where asked for."""

    key: int
    token_ids: list[int]
    finish_time: float
    first_token_time: float | None = None


class PeerEngine(Protocol):
    """What an adapter offers. One thread calls it."""

    def describe(self) -> dict[str, Any]:
        """Versions, settings and the dtypes of weights, activations and KV cache."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Send requests, at once. They may start only when `wait` is called."""
        ...

    def wait(self, deadline: float) -> list[Answer]:
        """Block until at least one request is done or the deadline has passed."""
        ...

    def cancel(self) -> None:
        """End what is in flight; nothing of it is answered later."""
        ...


class CutOffError(Exception):
    """A job took longer than it may."""


def serve(make_engine: Callable[[], PeerEngine]) -> None:
    """Load the engine, say so, and run jobs until told to exit. Does not return."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = make_engine()
    _send(answers, {"event": "ready", **engine.describe()})
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "exit":
            break
        _send(answers, _run(engine, command))
    # Some engines hang or crash when they are torn down.
    os._exit(0)


def _die_with_parent() -> None:
    """Also where this process is paused and the parent is killed: nobody would wake it again."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _run(engine: PeerEngine, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return asdict(_run_job(engine, command["job"], command["primed"], command["cut_off"]))
    except CutOffError:
        engine.cancel()
        return {"cut_off": command["cut_off"]}
    except Exception as error:
        engine.cancel()
        return {"error": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds since the clock started; lists are in the order of the requests.

    In chats the order is the first turns of all chats, then the second turns. Requests that are
    sent one after the other each have a clock of their own, and `seconds` is the sum.
    """

    seconds: float
    first_token_seconds: list[float]
    finish_seconds: list[float]
    token_ids: list[list[int]]


def _run_job(engine: PeerEngine, job: dict[str, Any], primed: bool, cut_off: float) -> Measured:
    for request in job["before"]:
        _ask_alone(engine, request, time.perf_counter() + cut_off)
    started = time.perf_counter()
    deadline = started + cut_off
    if primed:
        for prompt_ids in job["primer"]:
            _ask_alone(engine, {"prompt_ids": prompt_ids, "max_tokens": 1}, deadline)
    if job["kind"] == "batch":
        return _measured(started, _ask_at_once(engine, job["requests"], deadline))
    if job["kind"] == "chats":
        return _measured(started, _chat(engine, job["turns"], job["max_tokens"], deadline))
    alone = [_ask_alone(engine, request, deadline) for request in job["requests"]]
    return Measured(
        seconds=sum(answer.finish_seconds[0] for answer in alone),
        first_token_seconds=[answer.first_token_seconds[0] for answer in alone],
        finish_seconds=[answer.finish_seconds[0] for answer in alone],
        token_ids=[answer.token_ids[0] for answer in alone],
    )


def _ask_alone(engine: PeerEngine, request: dict[str, Any], deadline: float) -> Measured:
    started = time.perf_counter()
    engine.submit([Request(0, request["prompt_ids"], request["max_tokens"], is_timed=True)])
    answers = _wait(engine, deadline)
    _check_lengths(answers, [request["max_tokens"]])
    return _measured(started, answers)


def _ask_at_once(
    engine: PeerEngine, requests: list[dict[str, Any]], deadline: float
) -> list[Answer]:
    engine.submit(
        [Request(key, r["prompt_ids"], r["max_tokens"]) for key, r in enumerate(requests)]
    )
    answers: list[Answer] = []
    while len(answers) < len(requests):
        answers += _wait(engine, deadline)
    answers.sort(key=lambda answer: answer.key)
    _check_lengths(answers, [request["max_tokens"] for request in requests])
    return answers


def _chat(
    engine: PeerEngine, turns: list[list[list[int]]], max_tokens: int, deadline: float
) -> list[Answer]:
    """Each chat sends its next turn as soon as it has the answer to the last one."""
    histories = [list(chat[0]) for chat in turns]
    num_answered = [0] * len(turns)
    engine.submit([Request(i, list(history), max_tokens) for i, history in enumerate(histories)])
    answers: dict[tuple[int, int], Answer] = {}
    while any(n < len(chat) for n, chat in zip(num_answered, turns, strict=True)):
        due = []
        for answer in _wait(engine, deadline):
            chat = answer.key
            answers[num_answered[chat], chat] = answer
            num_answered[chat] += 1
            if num_answered[chat] < len(turns[chat]):
                histories[chat] += answer.token_ids + turns[chat][num_answered[chat]]
                due.append(Request(chat, list(histories[chat]), max_tokens))
        if due:
            engine.submit(due)
    in_order = [answers[key] for key in sorted(answers)]
    _check_lengths(in_order, [max_tokens] * sum(len(chat) for chat in turns))
    return in_order


def _wait(engine: PeerEngine, deadline: float) -> list[Answer]:
    answers = engine.wait(deadline)
    if not answers or time.perf_counter() > deadline:
        raise CutOffError
    return answers


def _check_lengths(answers: Sequence[Answer], wanted: Iterable[int]) -> None:
    lengths = [len(answer.token_ids) for answer in answers]
    if lengths != list(wanted):
        raise RuntimeError(f"answers of {lengths} tokens where {list(wanted)} were asked for")


def _measured(started: float, answers: Sequence[Answer]) -> Measured:
    return Measured(
        seconds=max(answer.finish_time for answer in answers) - started,
        first_token_seconds=[
            answer.first_token_time - started
            for answer in answers
            if answer.first_token_time is not None
        ],
        finish_seconds=[answer.finish_time - started for answer in answers],
        token_ids=[answer.token_ids for answer in answers],
    )
