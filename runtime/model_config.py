"""What a checkpoint's config.json says, as a checked value.

`ModelConfig` is what every decoder has. A model's own settings are in a class derived from it, in
the model's file, which also reads them. Nothing here knows tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sapwood.kernels.interface import Activation
from sapwood.runtime.checkpoint_json import field_of, read_json_object, token_ids_of, wrong_field
from sapwood.runtime.errors import ModelError, UnsupportedModelError
from sapwood.runtime.models import MODELS, load_model_class

DTYPES = ("float32", "bfloat16", "float16")
_MAX_COUNT = 100_000  # layers, heads: far above any model, and nothing is built in vain
_MAX_SIZE = 2**31
_MAX_CONTEXT = 2**23  # tokens; rope tables have a row for each, whatever the weights' shapes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and settings of a decoder. Names as in config.json.

    `layer_windows` is as in KVCacheSpec: how many tokens a row of each layer sees, None for all,
    and nothing at all where every layer sees all. `dtype` is the one the checkpoint was saved in.
    `eos_token_ids` holds those of config.json and of generation_config.json, in this order and
    without repetition.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            check_range(name, getattr(self, name), 1, _MAX_COUNT)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
            check_range(name, getattr(self, name), 1, _MAX_SIZE)
        # A prompt of one token and an answer of one.
        check_range("max_position_embeddings", self.max_position_embeddings, 2, _MAX_CONTEXT)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple "
                f"of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim is {self.head_dim}, it must be even")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"config.json: dtype {self.dtype} is not served; served are {', '.join(DTYPES)}"
            )


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of config.json, or of an object in it; each is checked by type when it is taken.

    Null means left out, but for `optional`. `where` names the object in messages.
    """

    values: Mapping[str, Any]
    where: str = "config.json"

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A field's value. Raises ModelError for neither a value nor a default."""
        return field_of(self.values, name, kind, default, where=self.where)

    def optional(self, name: str, kind: type[T], *, absent: T | None = None) -> T | None:
        """A field's value, None where it is null, and `absent` where it is not there at all."""
        if name not in self.values:
            return absent
        return None if self.values[name] is None else self.take(name, kind)

    def object(self, name: str) -> Fields:
        """The fields of an object in this one; none where it is left out."""
        values: dict[str, Any] = self.take(name, dict, {})
        return Fields(values, f"{self.where}: {name}")

    def list_of(self, name: str, kind: type[T]) -> list[T] | None:
        """A list's values, None where it is left out."""
        values = self.values.get(name)
        if values is None:
            return None
        if not isinstance(values, list):
            raise wrong_field(self.where, name, values, "a list")
        items = {str(index): value for index, value in enumerate(values)}
        where = f"{self.where}: {name}"
        return [field_of(items, index, kind, where=where) for index in items]


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json and, for more end tokens, generation_config.json.

    Raises ModelError for what is missing or malformed, UnsupportedModelError for what is not
    served.
    """
    raw = read_json_object(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.exists() else {}
    return parse_model_config(raw, generation)


def is_native(folder: Path) -> bool:
    """Whether the model in a folder has a file of its own in runtime/models.

    Raises ModelError where there is no config.json to say so.
    """
    return str(read_json_object(folder / "config.json").get("model_type")) in MODELS


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The same from the parsed files. Missing optional fields take transformers' defaults."""
    model_type = str(raw.get("model_type"))
    if model_type not in MODELS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not served; served are {', '.join(MODELS)}"
        )
    eos_token_ids = _eos_token_ids(raw, generation or {})
    fields = Fields({**raw, "eos_token_id": list(eos_token_ids)})
    return load_model_class(model_type).parse_config(fields)


def common_settings(
    fields: Fields,
    *,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    max_position_embeddings: int,
    rms_norm_eps: float = 1e-6,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """What `ModelConfig` itself holds, but for the windows; the arguments are a model's defaults.

    Without a default there are as many KV heads as heads, which share the hidden size.
    """
    hidden_size = fields.take("hidden_size", int)
    num_heads = fields.take("num_attention_heads", int)
    kv_default = num_heads
    if "num_key_value_heads" not in fields.values and num_key_value_heads is not None:
        kv_default = num_key_value_heads  # null means all heads, in every model
    settings: dict[str, Any] = {
        "model_type": fields.take("model_type", str),
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": fields.take("intermediate_size", int),
        "num_hidden_layers": fields.take("num_hidden_layers", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.take("num_key_value_heads", int, kv_default),
        "head_dim": fields.take("head_dim", int, head_dim or hidden_size // max(num_heads, 1)),
        "max_position_embeddings": fields.take(
            "max_position_embeddings", int, max_position_embeddings
        ),
        "rms_norm_eps": fields.take("rms_norm_eps", float, rms_norm_eps),
        "activation": _activation(fields, activation_field, activation),
        "tie_word_embeddings": fields.take("tie_word_embeddings", bool, tie_word_embeddings),
        "bos_token_id": next(
            iter(token_ids_of(fields.values, "bos_token_id", where="config.json")), None
        ),
        "eos_token_ids": tuple(token_ids_of(fields.values, "eos_token_id", where="config.json")),
        "dtype": str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"),
    }
    ModelConfig(**settings)  # sizes are checked before anything is made of them
    return settings


def sliding_layers(fields: Fields, default: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers see a window only, by `layer_types`; `default` where the field is left out."""
    layer_types = fields.list_of("layer_types", str)
    if layer_types is None:
        return tuple(default)
    if len(layer_types) != len(default):
        raise ModelError(
            f"config.json: layer_types has {len(layer_types)} entries for {len(default)} layers"
        )
    served = ("full_attention", "sliding_attention")
    if unknown := [name for name in layer_types if name not in served]:
        raise UnsupportedModelError(
            f"config.json: layer_types has {unknown[0]!r:.80}; served are {', '.join(served)}"
        )
    return tuple(name == "sliding_attention" for name in layer_types)


def layer_windows(
    sliding: Sequence[bool], window: int | None, max_position_embeddings: int
) -> tuple[int | None, ...]:
    """`ModelConfig.layer_windows` of a model whose `sliding` layers see `window` tokens.

    A window that holds the whole context is none.
    """
    if not any(sliding):
        return ()
    if window is None:
        raise ModelError("config.json: layer_types has sliding_attention, without a sliding_window")
    check_range("sliding_window", window, 1, _MAX_SIZE)
    if window >= max_position_embeddings:
        return ()
    return tuple(window if is_sliding else None for is_sliding in sliding)


def check_range(name: str, value: int, low: int, high: int = _MAX_SIZE) -> None:
    """Raises UnsupportedModelError for a value of config.json outside `low` to `high`."""
    if not low <= value <= high:
        raise UnsupportedModelError(
            f"config.json: {name} is {value!r:.40}; it must be {low} to {high}"
        )


def check_positive(name: str, value: float) -> None:
    """Raises UnsupportedModelError for a value of config.json that is not above zero."""
    if value <= 0:
        raise UnsupportedModelError(f"config.json: {name} is {value}, not positive")


def _activation(fields: Fields, name: str, default: str) -> Activation:
    activation_by_name = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
    written = fields.values.get(name) or default
    try:
        return activation_by_name[written]
    except (KeyError, TypeError) as error:
        raise UnsupportedModelError(
            f"{name} {written!r:.80} is not served; served are {', '.join(activation_by_name)}"
        ) from error


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found = token_ids_of(raw, "eos_token_id", where="config.json")
    more = token_ids_of(generation, "eos_token_id", where="generation_config.json")
    return tuple(dict.fromkeys([*found, *more]))
