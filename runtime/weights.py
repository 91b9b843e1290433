"""From a name, a folder or a file to a model that is ready to run.

Weights come from safetensors only: nothing here unpickles or runs code from a checkpoint. Where the
dtype already fits, tensors are memory-mapped and the file is read as the model touches it;
quantised ones become float first.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.kernels.user_cache import cache_folder
from sapwood.runtime.checkpoint_json import read_json_object
from sapwood.runtime.checkpoint_tensors import FLOATS, SafetensorsFolder, TensorSource, some_of
from sapwood.runtime.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from sapwood.runtime.gguf_convert import CONVERTER_VERSION, convert_gguf
from sapwood.runtime.model_cache import build_folder
from sapwood.runtime.model_config import DTYPES, ModelConfig, is_native, read_model_config
from sapwood.runtime.models import Model, ServedConfig, load_model_class
from sapwood.runtime.pull import KNOWN_MODELS, pull
from sapwood.runtime.quantize import MAX_DIVERGENCE, Quantize, int8_divergence
from sapwood.runtime.quantized_checkpoint import (
    float_weights,
    quant_method,
    quantization_settings,
)

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DUMMY_STANDARD_DEVIATION = 0.02
_MAX_SHAPES_IN_ERROR = 5


class LoadFormat(StrEnum):
    """Where the weights come from: the checkpoint, or random numbers of its shapes."""

    AUTO = "auto"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. `path` holds its tokenizer's files, where it came from a folder.

    `quantize` is what its projections are computed in: int8, or none for the model's dtype.
    """

    model: Model
    config: ServedConfig
    path: Path | None
    name: str
    quantize: Quantize


def load_model(
    source: str | Path | ModelConfig,
    *,
    kernels: Kernels,
    dtype: str = "auto",
    load_format: str = "auto",
    device: str | torch.device = "cpu",
    quantize: str = "none",
    verify_model: bool = False,
) -> LoadedModel:
    """Load `source`, fetching or converting it if this was not done before.

    `source` is the path of a model's folder or .gguf file, a name in `KNOWN_MODELS`, or the id of
    a hub repository; with `load_format="dummy"` also a `ModelConfig`. `dtype` is float32,
    bfloat16, float16 or auto: float32 on a CPU, the checkpoint's own elsewhere. `quantize` is none,
    int8 (float32 activations between projections in int8, on a CPU) or auto: int8 where it can be
    had, `dtype` is auto too and the model's predictions move by no more than
    quantize.MAX_DIVERGENCE. An architecture without a native file runs through transformers, in
    `dtype`, as does one whose file refuses its config.json; `verify_model` compares it with
    transformers' own attention first.

    Raises ConfigError for an unknown option, ModelNotFoundError and ModelAccessError where there
    is nothing to load, UnsupportedModelError for what is not served and ModelError for a
    checkpoint that does not fit its config.
    """
    started = time.perf_counter()
    device = torch.device(device)
    is_dummy = _load_format(load_format) is LoadFormat.DUMMY
    path, name = None, "dummy"
    if isinstance(source, ModelConfig):
        if not is_dummy:
            raise ConfigError('a ModelConfig has no weights; give load_format="dummy" or a folder')
        config = source
    else:
        name = _name(source)
        path = find_model(source)
        load_universal = partial(
            _load_universal,
            *(path, name, kernels, dtype, device, quantize),
            is_dummy=is_dummy,
            is_verified=verify_model,
        )
        if not is_native(path):
            return load_universal()
        try:
            config = read_model_config(path)
        except UnsupportedModelError as refusal:
            with _told_after(refusal):
                return load_universal()
    if verify_model:
        raise ConfigError(
            f"verify_model is for models that run through transformers, and {config.model_type} "
            "has a native file; leave it out"
        )
    chosen = choose_dtype(dtype, config, device)
    if is_dummy:
        weights = _random_weights(config, chosen, device)
    else:
        assert path is not None
        config, weights = _read_weights(path, config, chosen, device)
    wanted = _quantize(quantize)
    if wanted is Quantize.AUTO and dtype != "auto":
        wanted = Quantize.NONE  # who names a dtype wants that one
    model, quantized = _build(wanted, config, weights, kernels, None if is_dummy else path)
    logger.info(
        "loaded %s as %s%s on %s in %.2f s",
        name,
        chosen,
        " with int8 projections" if quantized is Quantize.INT8 else "",
        device,
        time.perf_counter() - started,
    )
    return LoadedModel(model=model, config=config, path=path, name=name, quantize=quantized)


@contextmanager
def _told_after(refusal: UnsupportedModelError) -> Iterator[None]:
    """Loading inside is what is left after the native file's `refusal`: a failure tells both."""
    logger.info("%s; trying transformers' own code", refusal)
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{refusal}. Through transformers' own code: {error}") from error


def _load_universal(
    path: Path,
    name: str,
    kernels: Kernels,
    dtype: str,
    device: torch.device,
    quantize: str,
    *,
    is_dummy: bool,
    is_verified: bool,
) -> LoadedModel:
    """The model in a folder that no native file serves, run by transformers' code."""
    from sapwood.runtime.universal.load import load_universal, read_universal_config

    config = read_universal_config(path)
    if _quantize(quantize) is Quantize.INT8:
        raise ConfigError(
            f"quantize is int8, and {config.model_type} runs through transformers, whose "
            "projections are computed in the model's dtype; use none"
        )
    if not is_dummy:
        SafetensorsFolder(path, torch.device("cpu"))  # raises where there are none, or broken ones
    model = load_universal(
        config,
        None if is_dummy else path,
        kernels=kernels,
        dtype=choose_dtype(dtype, config, device),
        device=device,
        is_verified=is_verified,
    )
    return LoadedModel(model=model, config=config, path=path, name=name, quantize=Quantize.NONE)


def _build(
    quantize: Quantize,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    path: Path | None,
) -> tuple[Model, Quantize]:
    """The model, in int8 if that is asked for or, in a checkpoint at `path`, as good."""
    model_class = load_model_class(config.model_type)
    quantized = None
    if quantize is not Quantize.NONE:
        obstacle = _obstacle(weights)
        if obstacle is None and (quantized := kernels.quantized()) is None:
            obstacle = (
                f"the kernels {kernels.name!r} have no int8 here: it takes the cpu kernels and a C "
                "compiler (cc or gcc)"
            )
        if quantize is Quantize.INT8 and obstacle is not None:
            raise ConfigError(f"quantize is int8, and {obstacle}; use none")
    if quantize is Quantize.AUTO and quantized is not None and path is not None:
        divergence = int8_divergence(model_class, config, weights, kernels, quantized, path)
        if divergence <= MAX_DIVERGENCE:
            logger.info("int8 moves its predictions by %.4f nats a token", divergence)
        else:  # also NaN, for what could not be measured
            logger.warning(
                "%s runs in float32: int8 moves its predictions by %.4f nats a token and the limit "
                "is %.2f; quantize=int8 insists",
                path.name,
                divergence,
                MAX_DIVERGENCE,
            )
            quantized = None
    if quantized is None:
        return model_class(config, weights, kernels), Quantize.NONE
    return model_class(config, weights, quantized), Quantize.INT8


def _obstacle(weights: Mapping[str, Tensor]) -> str | None:
    """What keeps a model of these weights from int8."""
    tensor = next(iter(weights.values()))
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"the model is {dtype} on {tensor.device}; it must be float32 on a CPU"


def _quantize(value: str) -> Quantize:
    try:
        return Quantize(value)
    except ValueError as error:
        raise ConfigError(f"quantize is {value!r}; it is {', '.join(Quantize)}") from error


def find_model(source: str | Path) -> Path:
    """The folder with config.json, weights and tokenizer of `source`; see `load_model`.

    A known name comes before a file of the same name (write ./name for that), files come before
    the hub.
    """
    if source in KNOWN_MODELS:
        return _converted(pull(str(source)))
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _converted(path)
        raise UnsupportedModelError(
            f"{path} is not a .gguf file; served are .gguf files and folders with safetensors"
        )
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or path.suffix == ".gguf":
        raise ModelNotFoundError(
            f"{source} does not exist; give a folder, a .gguf file, a hub id like owner/name or "
            f"one of {', '.join(KNOWN_MODELS)}"
        )
    return pull(source)


def _name(source: str | Path) -> str:
    """What the model is called in answers: the name or id given, or the last part of a path."""
    path = Path(source).expanduser()
    if source in KNOWN_MODELS or not path.exists():
        return str(source)
    return path.resolve().stem if path.is_file() else path.resolve().name


def _load_format(value: str) -> LoadFormat:
    try:
        return LoadFormat(value)
    except ValueError as error:
        raise ConfigError(f"load_format is {value!r}; it is {' or '.join(LoadFormat)}") from error


def choose_dtype(name: str, config: ServedConfig, device: torch.device) -> torch.dtype:
    """The dtype that `name` means for a model on a device. Raises ConfigError for another name."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it is auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _converted(gguf: Path) -> Path:
    """The folder converted from `gguf`, made on first use.

    The key is the file's place, size and time of change: to hash a file of many gigabytes would
    take longer than to load it.
    """
    status = gguf.stat()
    identity = f"{gguf.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{CONVERTER_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = cache_folder() / "converted" / f"{gguf.stem}-{key}"
    if not folder.is_dir():
        logger.info("converting %s, once, to %s", gguf.name, folder)
    return build_folder(folder, partial(convert_gguf, gguf))


def _read_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """The checkpoint's tensors that the model is built from, checked by name and shape first.

    With them `config`, which is mistaken where it ties a head of its own; see `_as_stored`.
    """
    model_class = load_model_class(config.model_type)
    source = _float_tensors(folder, model_class.weight_shapes(config), dtype, device)
    config = _as_stored(config, source, folder)
    expected = model_class.weight_shapes(config)
    headers = source.headers
    _check_dtypes(folder, {n: header.dtype for n, header in headers.items() if n in expected})
    unused = model_class.unused_weights(config, headers)
    found = {name: header.shape for name, header in headers.items() if name not in unused}
    _check_shapes(folder, found, expected)
    return config, {name: source.read(name).to(dtype) for name in headers if name in expected}


def _as_stored(config: ModelConfig, source: TensorSource, folder: Path) -> ModelConfig:
    """`config`, untied where the checkpoint's head is not a copy of its embedding.

    Whoever trains a head by itself and leaves `tie_word_embeddings` as it was saves both.
    transformers takes the head that is stored, too.
    """
    names = ("model.embed_tokens.weight", "lm_head.weight")
    if not config.tie_word_embeddings or any(name not in source.headers for name in names):
        return config
    embedding, head = (source.read(name).to(torch.float32) for name in names)
    if torch.equal(embedding, head):
        return config
    logger.warning(
        "%s: config.json ties the head to the embedding, and the checkpoint has a head of its own, "
        "which is taken; tie_word_embeddings=false in config.json says so",
        folder.name,
    )
    return replace(config, tie_word_embeddings=False)


def _float_tensors(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> TensorSource:
    """The checkpoint's tensors, the quantised ones as float."""
    stored = SafetensorsFolder(folder, device)
    settings = quantization_settings(read_json_object(folder / "config.json"))
    if settings is None:
        return stored
    source = float_weights(stored, settings).without_idle_biases(expected)
    num_values = sum(math.prod(header.shape) for header in source.headers.values())
    logger.warning(
        "%s: %d weights quantised by %s become %s, %.2f GB in memory for all of the model",
        folder.name,
        source.num_quantized,
        quant_method(settings),
        str(dtype).removeprefix("torch."),
        num_values * dtype.itemsize / 1e9,
    )
    return source


def _check_dtypes(folder: Path, dtypes: Mapping[str, str]) -> None:
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            raise UnsupportedModelError(
                f"the checkpoint in {folder} has {name} as {dtype}; served are weights in "
                f"{', '.join(FLOATS)}"
            )


def _check_shapes(
    folder: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    complaints = []
    if missing := sorted(expected.keys() - found.keys()):
        complaints.append(f"lacks {some_of(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        complaints.append(f"has {some_of(unexpected)}, which the model has no place for")
    complaints += [
        f"has {name} of shape {list(found[name])} where its config.json says {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ][:_MAX_SHAPES_IN_ERROR]
    if complaints:
        raise ModelError(f"the checkpoint in {folder} {'; '.join(complaints)}")


def _random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Mapping[str, Tensor]:
    """Normal weights and unit norms, the same for every run on one kind of device."""
    shapes = load_model_class(config.model_type).weight_shapes(config)
    return dict(_random_tensors(shapes, dtype, device))


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            yield name, tensor.normal_(std=_DUMMY_STANDARD_DEVIATION, generator=generator)
