"""`sapwood serve`: an engine behind HTTP."""

import errno
import gc
import logging
import socket
import time
from contextlib import suppress
from enum import StrEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import sapwood
from sapwood.runtime.config import BatchingMode, EngineConfig, option_groups
from sapwood.runtime.errors import ConfigError
from sapwood.server.cli.pull import fetch

if TYPE_CHECKING:
    from sapwood.runtime.async_engine import AsyncEngine
    from sapwood.runtime.build import EngineInfo


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_UNITS = (("kib", 2**10), ("mib", 2**20), ("gib", 2**30), ("k", 2**10), ("m", 2**20), ("g", 2**30))


def parse_size(text: str | int) -> int:
    """Bytes in `8589934592`, `512MiB` or `8G`; the units are powers of 1024."""
    number, factor = str(text).strip().lower(), 1
    for unit, size in _UNITS:
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), size
            break
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is not a size; write 4GiB, 512MiB or bytes") from error


def parse_switch(text: str | bool) -> bool | str:
    """True for on, False for off, and auto."""
    known: dict[str, bool | str] = {"on": True, "off": False, "auto": "auto"}
    try:
        return known[str(text).strip().lower()]
    except KeyError:
        raise typer.BadParameter(f"{text!r} is none of auto, on and off") from None


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A known name, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    fd: Annotated[
        int | None,
        typer.Option(min=0, help="Number of an open socket to listen on, instead of those two."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name that requests may use; may be repeated.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 32,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged.")] = LogLevel.INFO,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantize: Annotated[
        str, typer.Option(help="none, int8 (on a CPU), or auto: int8 if predictions hardly move.")
    ] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, or the name of a backend.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer; the model's own if not given.")
    ] = None,
    reasoning: Annotated[
        str, typer.Option(help="How the model marks its reasoning: auto, none, or a name.")
    ] = "auto",
    tool_format: Annotated[
        str, typer.Option(help="How the model writes tool calls: auto, or the name of a format.")
    ] = "auto",
    verify_model: Annotated[
        bool,
        typer.Option(
            "--verify-model",
            help="Compare a model that runs through transformers with transformers' own attention.",
        ),
    ] = False,
    cuda_graphs: Annotated[
        str,
        typer.Option(
            help="Steps of few rows on a GPU: recorded at the start, lazy, none, or auto: start "
            "where the model can."
        ),
    ] = "auto",
    max_graph_rows: Annotated[int, typer.Option(help="Rows of the largest of those steps.")] = 256,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV cache block.")] = 16,
    kv_dtype: Annotated[
        str, typer.Option(help="Of keys and values: int8, fp8, or auto: as activations, or so.")
    ] = "auto",
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Of a GPU's memory, for weights, steps and KV cache together; 0.9 if no option "
            "says how large the cache is."
        ),
    ] = None,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Of the KV cache, such as 4GiB, instead."
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache holds, instead.")
    ] = None,
    num_kv_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache, instead.")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share computed prefixes.")] = True,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 128,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one step; 2048 on a GPU and 512 on a CPU.")
    ] = None,
    schedule_policy: Annotated[
        str, typer.Option(help="Who runs next: lpm (longest cached prefix first) or fcfs.")
    ] = "lpm",
    max_overtakes: Annotated[
        int, typer.Option(help="A request that was overtaken that often goes first.")
    ] = 64,
    mode: Annotated[BatchingMode, typer.Option(help="How requests join a batch.")] = (
        BatchingMode.CONTINUOUS
    ),
    overlap: Annotated[
        str,
        typer.Option(
            parser=parse_switch,
            metavar="auto|on|off",
            help="Plan a step while the device computes the one before; auto: not on a CPU.",
        ),
    ] = "auto",
    jump_forward: Annotated[
        bool, typer.Option(help="Skip tokens that a constraint leaves no choice of.")
    ] = True,
    constraint_backend: Annotated[
        str, typer.Option(help="What compiles constraints of requests that name no backend.")
    ] = "llguidance",
    constraint_deadline_ms: Annotated[
        int, typer.Option(help="Time for compiling one constraint; at most 5000.")
    ] = 250,
    constraint_cache_memory: Annotated[
        int,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Of compiled constraints that are kept."
        ),
    ] = 2**28,
    check_invariants: Annotated[
        bool, typer.Option(hidden=True, help="Check all structures after every step. Slow.")
    ] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, a native one, health and metrics."""
    options = {name: context.params[name] for name in option_groups()}
    # A number out of range is told before anything is loaded; names are looked up on loading.
    EngineConfig.from_options(**options)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("sapwood").setLevel(log_level.upper())
    console = Console(highlight=False, soft_wrap=True)
    with bind(host, port) if fd is None else inherited(fd) as listener:
        if not is_loopback(listener):
            address = listener.getsockname()[0]
            console.print(
                f"[yellow]{address} can be reached from elsewhere, and nobody is asked who"
            )
        fetch(model, console)
        run(
            console,
            listener,
            options,
            served_model_names=served_model_name or (),
            max_body_bytes=max_body_mb * 2**20,
        )


def run(
    console: Console, listener: socket.socket, options: dict[str, Any], **app_options: Any
) -> None:
    """Answer on `listener` at once, load on a thread, say when it is ready, and go on until told
    to end. Raises whatever loading raised."""
    from sapwood.server.app import create_app
    from sapwood.server.process import DrainingServer

    started = time.monotonic()
    failures: list[Exception] = []

    def load() -> "AsyncEngine":
        try:
            from sapwood.runtime.async_engine import AsyncEngine

            import_seconds = time.monotonic() - started
            engine = AsyncEngine(**options)
        except Exception as error:
            failures.append(error)
            server.should_exit = True
            raise
        # What is loaded stays: a collection that goes through all of it halts every stream.
        gc.collect()
        gc.freeze()
        console.print(banner(engine.info, url_of(listener)))
        seconds, load_seconds = time.monotonic() - started, engine.info.load_seconds
        console.print(
            f"ready in {seconds:.1f} s (imports {import_seconds:.1f} s, model {load_seconds:.1f} s)"
            "; Ctrl-C ends it"
        )
        return engine

    console.print(f"loading {options['model']}")
    server = DrainingServer(create_app(load=load, **app_options))
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
    console.print("stopped")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # from here on nobody else gets the port
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            way_out = "choose another --port (0 takes any that is free), or end what listens there"
            raise ConfigError(f"port {port} on {host} is in use; {way_out}") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


def inherited(fd: int) -> socket.socket:
    """A listening socket that whoever started this process opened. Raises ConfigError."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"fd is {fd}, which is no socket of this process: {error}") from error
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not is_listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        listener.detach()
        raise ConfigError(f"fd is {fd}, which is no socket that listens on an address and a port")
    return listener


def is_loopback(listener: socket.socket) -> bool:
    return ip_address(listener.getsockname()[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    address = ip_address(host)
    if address.is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(info: "EngineInfo", url: str) -> str:
    """What is served, where, and how to try it."""
    path, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if not info.has_chat_template:
        path, body = "completions", '"prompt": "Once upon a time"'
    sharing = "prefix sharing" if info.prefix_caching else "no prefix sharing"
    graphs = f", graphs up to {info.max_graph_rows} rows" if info.max_graph_rows else ""
    lines = {
        "model": f"{info.model_name}, {info.precision} on {info.device}, {info.kernels} kernels",
        "context": f"{info.max_model_len:,} tokens",
        "KV cache": (
            f"{info.kv_capacity_tokens:,} tokens, {info.kv_bytes / 2**30:.2f} GiB, "
            f"blocks of {info.block_size}"
        ),
        "steps": f"up to {info.max_num_batched_tokens:,} tokens{graphs}",
        "on": f"{sharing}, {info.schedule_policy} scheduling, /metrics",
        "API": f"{url}/v1, {url}/generate, described at {url}/docs",
        "try": f'curl {url}/v1/{path} -d \'{{{body}, "temperature": 0, "max_tokens": 64}}\'',
    }
    head = f"Sapwood {sapwood.__version__}"
    return escape("\n".join([head, *(f"  {name:9}{text}" for name, text in lines.items())]))
