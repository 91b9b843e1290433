"""`sapwood chat`: a conversation in the terminal, with a model here or one behind a server.

Each turn sends the whole conversation; what the last turn computed is found in the tree again, and
the line below each answer says how much that was.
"""

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sapwood.runtime.errors import (
    EngineError,
    ModelAccessError,
    RequestError,
    UnsupportedModelError,
)
from sapwood.server.cli.pull import fetch

if TYPE_CHECKING:
    import httpx

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of one turn."""

    prompt: int
    cached: int
    generated: int


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


# Pieces of the answer to a conversation, and then its counts. Closing it ends the answer.
Answer = Generator[str | Reasoning | Counts, None, None]
Talk = Callable[[list[Message]], Answer]


COMMANDS_HELP = "/clear begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="What to load (smollm2 if not given), or the server's name for it."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server, such as http://127.0.0.1:8000.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
) -> None:
    """Talk with a model in the terminal."""
    console = Console(highlight=False)
    options = {"temperature": temperature, "max_tokens": max_tokens}
    if url is None:
        connection = in_process(model or "smollm2", options, console)
    else:
        connection = remote(url, options | ({"model": model} if model else {}))
    with connection as talk:
        console.print(COMMANDS_HELP)
        converse(talk, console, system)


def converse(talk: Talk, console: Console, system: str | None) -> None:
    """Read turns and answer them until the input ends."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read(console)) is not None:
        if line == "/clear":
            messages = list(opening)
        elif line.startswith("/"):
            console.print(f"{line} is no command; {COMMANDS_HELP}", style="red", markup=False)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                content = _show(talk(messages), console)
            except (RequestError, EngineError) as error:
                console.print(f"{error}", style="red", markup=False)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": content})


def _read(console: Console) -> str | None:
    """The next line without its ends; None when there is nothing more to say."""
    try:
        line = console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line in ("/exit", "/quit") else line


def _show(answer: Answer, console: Console) -> str:
    """Print an answer while it comes; its content. Ctrl-C ends it early."""
    pieces: list[str] = []
    counts: Counts | None = None
    started, first, is_reasoning = time.monotonic(), 0.0, False
    with closing(answer):
        try:
            for piece in answer:
                if isinstance(piece, Counts):
                    counts = piece
                    continue
                first = first or time.monotonic()
                if isinstance(piece, Reasoning):
                    is_reasoning = True
                    console.out(piece.text, end="", style="dim")
                    continue
                if is_reasoning and piece:
                    is_reasoning = False
                    console.print("\n")
                pieces.append(piece)
                console.out(piece, end="")
        except KeyboardInterrupt:
            console.print(" (stopped)", end="")
    console.print()
    if counts is not None:
        console.print(_summary(counts, started, first or started), style="dim", soft_wrap=True)
    return "".join(pieces)


def _summary(counts: Counts, started: float, first: float) -> str:
    """What the turn cost; the rate is that of the tokens after the first."""
    seconds = time.monotonic() - first
    rate = f", {(counts.generated - 1) / seconds:.1f} tok/s" if counts.generated > 1 else ""
    computed = counts.prompt - counts.cached
    return (
        f"prompt {counts.prompt} tokens: {counts.cached} cached, {computed} computed; "
        f"first token after {first - started:.2f} s; {counts.generated} generated{rate}"
    )


@contextmanager
def in_process(model: str, options: dict[str, Any], console: Console) -> Iterator[Talk]:
    """A model in this process. Raises ModelError."""
    from sapwood.runtime.sampling_params import SamplingParams

    sampling = SamplingParams(**options)
    fetch(model, console)
    with console.status(f"loading {model}"):
        from sapwood.runtime.engine import Engine  # imports torch, which takes a second

        engine = Engine(model)
    if not engine.info.has_chat_template:
        engine.close()
        raise UnsupportedModelError(
            f"{model} has no chat template, so it cannot hold a conversation; serve it and send "
            "plain prompts to /v1/completions"
        )

    def talk(messages: list[Message]) -> Answer:
        generated = 0
        for output in engine.stream(messages, sampling):
            [answer] = output.outputs
            generated += len(answer.token_ids)
            if answer.parts is not None and answer.parts.reasoning:
                yield Reasoning(answer.parts.reasoning)
            yield answer.text if answer.parts is None else answer.parts.content
        yield Counts(
            prompt=len(output.prompt_token_ids),
            cached=output.num_cached_tokens,
            generated=generated,
        )

    with engine:
        yield talk


@contextmanager
def remote(url: str, options: dict[str, Any]) -> Iterator[Talk]:
    """A model behind a server that speaks OpenAI's API. Raises ModelAccessError."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    body = options | {"stream": True, "stream_options": {"include_usage": True}}

    def talk(messages: list[Message]) -> Answer:
        request = body | {"messages": messages}
        with client.stream("POST", "/v1/chat/completions", json=request) as response:
            yield from _events(response)

    try:
        with httpx.Client(base_url=base, timeout=httpx.Timeout(600, connect=5)) as client:
            client.get("/v1/models").raise_for_status()
            yield talk
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelAccessError(
            f"the server at {base} cannot be used ({error}); start one with `sapwood serve`, or "
            "leave --url out"
        ) from error


def _events(response: "httpx.Response") -> Answer:
    """Pieces and counts in a stream. Raises RequestError or EngineError if it tells of an error."""
    if response.status_code != 200:
        response.read()
        error = RequestError if response.status_code < 500 else EngineError
        raise error(_message(response.text))
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise EngineError(_message(data))
        for choice in event["choices"]:
            if reasoning := choice["delta"].get("reasoning_content"):
                yield Reasoning(reasoning)
            yield choice["delta"].get("content") or ""
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            yield Counts(
                prompt=usage["prompt_tokens"],
                cached=details.get("cached_tokens") or 0,
                generated=usage["completion_tokens"],
            )


def _message(text: str) -> str:
    """What an error envelope says, or the text if it is none."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
