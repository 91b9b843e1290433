"""Our server as a process of its own, for a program that wants one."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sapwood.frontend_lang.backends.runtime_endpoint import RuntimeEndpoint
from sapwood.runtime.errors import ConfigError, EngineError

POLL_SECONDS = 0.05
END_SECONDS = 15.0  # that a server has to end by itself; then it is killed
MAX_LOG_CHARACTERS = 2000  # of what a server that did not start had to say


class Runtime(RuntimeEndpoint):
    """A model behind a server in a process of its own, on a free port of this machine.

        with Runtime("smollm2", max_model_len=2048) as backend:
            state = program.run(backend=backend)

    `options` are those of `Engine`. Making one takes as long as loading the model; `shutdown` ends
    the process, and so does the end of this one. `timeout` and `chat_template` are those of
    `RuntimeEndpoint`.

    Raises ConfigError for a wrong option, EngineError where the server does not start, with what it
    said.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        model_path: str | None = None,
        start_seconds: float = 3600.0,
        timeout: float | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        """`model_path` is SGLang's word for `model`. `start_seconds`: how long loading may take."""
        if model is not None and model_path is not None:
            raise ConfigError("model and model_path say the same; give one of them")
        arguments = serve_arguments(model or model_path or "smollm2", options)
        self._server = _Server(arguments)
        try:
            self._server.wait_until_ready(start_seconds)
            super().__init__(self._server.url, timeout=timeout, chat_template=chat_template)
        except BaseException:
            self._server.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._server.process.pid

    def shutdown(self) -> None:
        """End the server; what runs on it fails. Idempotent. Takes some seconds at most."""
        self.close()
        self._server.end()


def serve_arguments(model: str, options: dict[str, Any]) -> list[str]:
    """Engine options as `sapwood serve` takes them. Raises ConfigError for a wrong one."""
    from sapwood.runtime.config import EngineConfig, option_groups

    config = EngineConfig.from_options(model, **options)
    defaults = EngineConfig()
    arguments = [model]
    for name in options:
        group = option_groups()[name]
        value = getattr(getattr(config, group), name)
        if value == getattr(getattr(defaults, group), name):
            continue
        flag = name.replace("_", "-")
        match value:
            case bool():
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            case _:
                arguments += [f"--{flag}", str(value)]
    return arguments


class _Server:
    """A process of `sapwood serve`. It gets a socket that listens already, so that no port has to
    be guessed and nothing that connects early is refused."""

    def __init__(self, arguments: list[str]) -> None:
        self._log = tempfile.TemporaryFile()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            number = listener.fileno()
            # `-c`, as the package may be importable without being installed.
            start = "from sapwood.server.cli import main; main()"
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, "serve", *arguments]
                + ["--fd", str(number), "--log-level", "warning"],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(number,),
                env=os.environ | {"PYTHONPATH": _search_path()},
                start_new_session=True,  # Ctrl-C is ours: we end it when we end
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self._log)

    def wait_until_ready(self, seconds: float) -> None:
        """Return once it answers. Raises EngineError where it ends or takes longer."""
        import httpx

        deadline = time.monotonic() + seconds
        with httpx.Client(base_url=self.url, timeout=10.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise EngineError(f"the server did not start: {self._said()}")
                try:
                    if client.get("/ready").is_success:
                        return
                except httpx.TransportError:
                    pass  # it does not listen yet, or has just ended
                time.sleep(POLL_SECONDS)
        raise EngineError(
            f"the server was not ready within {seconds:g} seconds; give it more start_seconds: "
            f"{self._said()}"
        )

    def end(self) -> None:
        """End the process, if it has not ended."""
        self._finalizer()

    def _said(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return text[-MAX_LOG_CHARACTERS:] or "it said nothing"


def _search_path() -> str:
    """Where the process finds this package, also where this one found it by its own path."""
    folder = str(Path(__file__).absolute().parents[3])
    return os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def _end(process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
