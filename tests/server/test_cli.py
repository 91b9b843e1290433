"""The command line: what it offers, how it ends, and one server from start to Ctrl-C."""

import inspect
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

import sapwood
from sapwood.runtime.config import EngineConfig, option_groups
from sapwood.runtime.errors import ConfigError, EngineError, ModelAccessError, RequestError
from sapwood.server.cli import COMMANDS, build_cli
from sapwood.server.cli.chat import Counts, Reasoning, converse, remote
from sapwood.server.cli.pull import fetch
from sapwood.server.cli.serve import bind, inherited, is_loopback, parse_size, serve, url_of
from tests.server.fakes import ANSWER, FakeEngine

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sapwood", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_help_and_version_need_no_torch():
    code = (
        "import sys; sys.argv = ['sapwood', '--help']; from sapwood.server.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(not {'torch', 'fastapi', 'uvicorn', 'httpx'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    assert run("version").stdout.strip() == sapwood.__version__


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(build_cli(), [command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_serve_takes_every_engine_option_with_its_default():
    parameters = inspect.signature(serve).parameters
    config = EngineConfig()
    for name, group in option_groups().items():
        assert parameters[name].default == getattr(getattr(config, group), name), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--dtype", "int3"), "dtype is 'int3'"),
        (("serve", "--max-num-seqs", "0"), "max_num_seqs is 0"),
        (("chat", "--url", "http://127.0.0.1:9"), "start one with `sapwood serve`"),
        (("pull", "no such model"), "is no folder or file here"),
    ],
)
def test_an_error_of_ours_is_one_line_and_exit_code_one(arguments, words):
    result = run(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("sapwood: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_pull_says_where_the_model_is(monkeypatch, tmp_path):
    def fake_pull(name: str, progress: Any) -> Path:
        progress(1, None, f"downloading {name}")
        progress(2, 4, f"downloading {name}")
        return tmp_path / "model.gguf"

    monkeypatch.setattr("sapwood.runtime.pull.pull", fake_pull)
    result = CliRunner().invoke(build_cli(), ["pull", "some/model"])
    assert result.exit_code == 0
    assert f"some/model is at {tmp_path}/model.gguf" in result.output


def test_a_model_is_fetched_only_if_it_is_neither_here_nor_a_path(monkeypatch, tmp_path):
    fetched = []
    monkeypatch.setattr("sapwood.runtime.pull.pull", lambda name, progress: fetched.append(name))
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    out = io.StringIO()
    for model in ("smollm2", "owner/name", str(tmp_path), "./nothing", "a/b/c"):
        fetch(model, Console(file=out))
    assert fetched == ["smollm2", "owner/name"]
    assert "smollm2 is not here yet" in out.getvalue()


def test_an_unknown_option_is_a_usage_error():
    assert CliRunner().invoke(build_cli(), ["serve", "--no-such-option"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("4GiB", 4 * 2**30), ("512m", 512 * 2**20), ("1.5 KiB", 1536), ("2G", 2**31)],
)
def test_sizes_have_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4TBx", "inf"])
def test_what_is_no_size_is_refused(text):
    result = CliRunner().invoke(build_cli(), ["serve", "--kv-cache-memory", text])
    assert result.exit_code == 2


def test_a_port_that_is_taken_is_told_with_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="is in use; choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_an_address_that_is_not_ours_is_told():
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("203.0.113.1", 0)


def test_a_socket_that_was_handed_over_is_taken_as_it_is():
    with socket.create_server(("127.0.0.1", 0)) as given:
        with inherited(os.dup(given.fileno())) as listener:
            assert url_of(listener) == f"http://127.0.0.1:{given.getsockname()[1]}"


def test_what_is_no_socket_that_listens_is_told(tmp_path):
    with open(tmp_path / "file", "w") as file, pytest.raises(ConfigError, match="is no socket"):
        inherited(file.fileno())
    with socket.socket() as idle, pytest.raises(ConfigError, match="no socket that listens"):
        inherited(idle.fileno())


def test_the_url_is_one_that_works_from_here():
    with bind("127.0.0.1", 0) as listener:
        assert is_loopback(listener)
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with bind("0.0.0.0", 0) as listener:
        assert not is_loopback(listener)
        assert url_of(listener).startswith("http://localhost:")


def serving(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server process, and the lines it printed up to the one that says it is ready."""
    command = [sys.executable, "-m", "sapwood", "serve", str(model), "--load-format", "dummy"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--num-kv-blocks", "64", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("ready in"):
                break
        else:
            pytest.fail("\n".join(lines))
        yield process, lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    yield from serving(tiny_model, "--served-model-name", "tiny", "--log-level", "warning")


def url_in(lines: list[str]) -> str:
    [line] = [line for line in lines if line.startswith("  API")]
    return line.split()[1].rstrip(",").removesuffix("/v1")


def test_a_server_says_what_it_serves_answers_and_ends_on_ctrl_c(server):
    process, lines = server
    assert len(lines) <= 12
    text = "\n".join(lines)
    assert "1,024 tokens" in text
    assert "curl http://127.0.0.1:" in text
    with httpx.Client(base_url=url_in(lines), timeout=60) as client:
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        endless = body | {"stream": True, "max_tokens": 1000, "min_tokens": 900}
        with client.stream("POST", "/v1/chat/completions", json=endless) as response:
            events = (line for line in response.iter_lines() if line)
            next(events)
            process.send_signal(signal.SIGINT)
            *_, last = events
            assert last == "data: [DONE]" or '"error"' in last
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("stopped")


class FakeTalk:
    """Answers with the number of messages, and fails on demand."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    def __call__(self, messages: list[dict[str, str]]) -> Any:
        self.seen.append([dict(message) for message in messages])
        if messages[-1]["content"] == "fail":
            raise EngineError("a step failed")
        if messages[-1]["content"] == "interrupt":
            yield "be"
            raise KeyboardInterrupt
        if messages[-1]["content"] == "think":
            yield Reasoning("which ")
            yield Reasoning("one?")
            yield ""
        yield "I am "
        yield f"number {len(messages)}"
        yield Counts(prompt=10, cached=7, generated=4)


def conversation(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> Any:
    """What was printed, and the talk, after a conversation that ends with the input."""
    talk, out = FakeTalk(), io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    converse(talk, Console(file=out, width=200), system)
    return out.getvalue(), talk


def test_a_conversation_sends_all_of_its_turns(monkeypatch):
    printed, talk = conversation(monkeypatch, "one", "", "two", system="be brief")
    assert [len(messages) for messages in talk.seen] == [2, 4]
    assert talk.seen[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "I am number 2"},
        {"role": "user", "content": "two"},
    ]
    assert "I am number 4" in printed
    assert "prompt 10 tokens: 7 cached, 3 computed" in printed
    assert "4 generated" in printed


def test_reasoning_is_shown_and_not_sent_back(monkeypatch):
    printed, talk = conversation(monkeypatch, "think", "two")
    assert "which one?\n\nI am number 1\n" in printed
    assert talk.seen[1][1] == {"role": "assistant", "content": "I am number 1"}


def test_clear_begins_anew_and_exit_ends(monkeypatch):
    _, talk = conversation(monkeypatch, "one", "/clear", "two", "/exit", "three")
    assert [messages[0]["content"] for messages in talk.seen] == ["one", "two"]


def test_an_unknown_command_is_not_sent_to_the_model(monkeypatch):
    printed, talk = conversation(monkeypatch, "/help", "one", "/quit", "two")
    assert "/help is no command; /clear begins anew" in printed
    assert [messages[-1]["content"] for messages in talk.seen] == ["one"]


def test_a_turn_that_fails_is_told_and_forgotten(monkeypatch):
    printed, talk = conversation(monkeypatch, "fail", "two")
    assert "a step failed" in printed
    assert talk.seen[1] == [{"role": "user", "content": "two"}]


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_came(monkeypatch):
    printed, talk = conversation(monkeypatch, "interrupt", "two")
    assert "(stopped)" in printed
    assert talk.seen[1][1] == {"role": "assistant", "content": "be"}


def test_a_remote_conversation_streams_with_counts(listen_to_fake):
    with remote(listen_to_fake + "/v1/", {"temperature": 0}) as talk:
        *pieces, counts = talk([{"role": "user", "content": "hi"}])
        assert "".join(str(piece) for piece in pieces) == ANSWER
        assert counts.prompt == 8
        assert counts.generated == len(ANSWER.encode()) + 1
        with pytest.raises(RequestError, match="maximum context length"):
            list(talk([{"role": "user", "content": "x" * 5000}]))


def test_a_server_that_is_none_is_told():
    with pytest.raises(ModelAccessError, match="leave --url out"):
        with remote("http://127.0.0.1:9", {}):
            pass


@pytest.fixture
def listen_to_fake(listen: Any) -> str:
    url: str = listen(FakeEngine())
    return url
