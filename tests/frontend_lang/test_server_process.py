"""A server in a process of its own begins and ends with whoever wanted it."""

import gc
import os
from pathlib import Path

import pytest

import sapwood
from sapwood import ConfigError, EngineError, Runtime
from sapwood.frontend_lang.backends.server_process import _Server, serve_arguments


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_engine_options_are_the_commands() -> None:
    options = {
        "max_model_len": 256,
        "prefix_caching": False,
        "jump_forward": True,  # the default
        "verify_model": True,
        "mode": "static",
        "kv_cache_memory": 2**20,
    }
    assert serve_arguments("m", options) == [
        "m",
        *("--max-model-len", "256"),
        "--no-prefix-caching",
        "--verify-model",
        *("--mode", "static"),
        *("--kv-cache-memory", "1048576"),
    ]
    with pytest.raises(ConfigError, match="unknown engine option 'tp_size'"):
        Runtime("m", tp_size=2)
    with pytest.raises(ConfigError, match="say the same"):
        Runtime("m", model_path="m")


def test_a_program_runs_on_a_server_of_its_own_and_it_ends(tiny_model: Path) -> None:
    @sapwood.function
    def program(s: sapwood.ProgramState, question: str) -> None:
        s += sapwood.user(question)
        s += sapwood.assistant(sapwood.gen("answer", max_tokens=4, temperature=0))

    with Runtime(model_path=str(tiny_model), num_kv_blocks=64, max_num_seqs=4) as backend:
        assert is_running(backend.pid)
        state = program.run(question="Why?", backend=backend)
        assert state["answer"]
        with sapwood.Engine(str(tiny_model), num_kv_blocks=64) as engine:
            assert program.run(question="Why?", backend=engine)["answer"] == state["answer"]
        pid = backend.pid
    assert not is_running(pid)
    backend.shutdown()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)did not start: .*config\.json"):
        Runtime(str(tmp_path))


def test_a_server_that_nobody_holds_any_more_ends(tiny_model: Path) -> None:
    server = _Server(serve_arguments(str(tiny_model), {}))
    process = server.process
    assert process.poll() is None
    del server
    gc.collect()
    assert process.poll() is not None
