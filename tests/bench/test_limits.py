import pytest
import torch
from common import Step
from limits import (
    BFLOAT16,
    FLOAT32,
    INT8,
    Limits,
    Linear,
    Mode,
    bound_by_part,
    linears_of,
    num_attended_pairs,
)

from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Activation
from sapwood.kernels.projections import Int8Projection
from sapwood.runtime.models import load_model_class
from sapwood.runtime.models.llama import LlamaConfig
from sapwood.runtime.models.rope import Rope

CONFIG = LlamaConfig(
    model_type="llama",
    vocab_size=50,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10000.0, dim=4),
    activation=Activation.SILU,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=None,
    eos_token_ids=(),
    dtype="float32",
)


def step(starts: tuple[int, ...], ends: tuple[int, ...], num_logits: int) -> Step:
    return Step(
        seconds=0.0,
        starts=starts,
        ends=ends,
        num_logits=num_logits,
        num_distinct_kv_tokens=max(ends),
    )


def mode(arithmetic: str) -> Mode:
    linears = tuple(linears_of(CONFIG))
    packed: tuple[object, ...] = (None,) * len(linears)
    if arithmetic == INT8:
        packed = tuple(_packed(linear) for linear in linears)
    return Mode(
        config=CONFIG,
        kernels=load_kernels("cpu"),
        linears=linears,
        packed=packed,
        kv_dtype=FLOAT32 if arithmetic == FLOAT32 else BFLOAT16,
    )


def _packed(linear: Linear) -> Int8Projection:
    """A layer of which only the sizes matter."""
    return Int8Projection(
        packed=torch.empty(linear.num_weights + 7, dtype=torch.uint8),
        num_bits=8,
        num_outputs=linear.num_outputs,
        num_inputs=linear.num_inputs,
        bias=None,
        num_planes=2 if linear.name == "head" else 1,
    )


def limits(float32: float, others: float, bandwidth: float) -> Limits:
    return Limits(
        ops_by_arithmetic={FLOAT32: float32, BFLOAT16: others, INT8: others},
        read_bandwidth=2 * bandwidth,
        copy_bandwidth=bandwidth,
    )


def test_the_linears_have_all_of_the_models_weights() -> None:
    shapes = load_model_class("llama").weight_shapes(CONFIG)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    matrices.pop("model.embed_tokens.weight")
    expected = sum(rows * columns for rows, columns in matrices.values())
    assert sum(linear.num_weights for linear in linears_of(CONFIG)) == expected


@pytest.mark.parametrize(
    ("starts", "ends"), [((0,), (7,)), ((5,), (6,)), ((3, 0, 9), (8, 2, 10)), ((4,), (4,))]
)
def test_a_row_sees_itself_and_what_is_before_it(
    starts: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    expected = sum(position + 1 for span in spans for position in span)
    assert num_attended_pairs(step(starts, ends, 1)) == expected


def test_only_rows_with_logits_count_behind_the_last_attention() -> None:
    layer = 12 * 20 + 12 * 12 + 12 * 40 + 20 * 12  # qkv, output, gate_up, down
    head = 12 * 50
    behind = layer - 12 * 20
    num_rows, num_logits = 10, 2
    rates = limits(1.0, 1.0, 1e30)  # an operation a second, and reading is free
    seconds = bound_by_part(mode(FLOAT32), step((0,), (num_rows,), num_logits), rates)
    assert seconds["head, float32"] == pytest.approx(2 * num_logits * head)
    all_rows, some_rows = 3 * layer - behind, behind
    expected = 2 * (num_rows * all_rows + num_logits * some_rows)
    assert seconds["linears, float32"] == pytest.approx(expected)


def test_int8_weights_are_read_as_they_are_packed() -> None:
    rates = limits(1e30, 1e30, 1.0)  # a byte a second, and computing is free
    one_row = step((0,), (1,), 1)
    quantized = bound_by_part(mode(INT8), one_row, rates)
    linears = list(linears_of(CONFIG))
    assert quantized["head, int8"] == pytest.approx(linears[-1].num_weights + 7)
    expected = sum(linear.num_weights + 7 for linear in linears[:-1])
    assert quantized["linears, int8"] == pytest.approx(expected)


def test_int8_scales_every_group_and_rounds_the_heads_rows_twice() -> None:
    one_row = step((0,), (1,), 1)
    # Its widths are 12 and 20, one group each.
    num_outputs = sum(linear.num_outputs for linear in linears_of(CONFIG)) - 50
    scaling = bound_by_part(mode(INT8), one_row, limits(1.0, 1e30, 1e30))
    assert scaling["linears, int8"] == pytest.approx(6 * num_outputs)
    assert scaling["head, int8"] == pytest.approx(6 * 50)
    products = bound_by_part(mode(INT8), one_row, limits(1e30, 1.0, 1e30))
    assert products["head, int8"] == pytest.approx(2 * 2 * 12 * 50)


def test_shared_keys_are_read_once_and_multiplied_by_every_row() -> None:
    decode = step((8, 8), (9, 9), 2)  # two requests over the same nine tokens
    layers, heads, kv_heads, head_dim = 3, 3, 1, 4
    reading = bound_by_part(mode(FLOAT32), decode, limits(1e30, 1e30, 1.0))
    assert reading["attention, float32"] == pytest.approx(layers * 2 * kv_heads * head_dim * 4 * 9)
    computing = bound_by_part(mode(FLOAT32), decode, limits(1.0, 1.0, 1e30))
    assert computing["attention, float32"] == pytest.approx(layers * 4 * heads * head_dim * 2 * 9)
    half = bound_by_part(mode(INT8), decode, limits(1e30, 1e30, 1.0))
    assert half["attention, bfloat16"] == pytest.approx(reading["attention, float32"] / 2)
