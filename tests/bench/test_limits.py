import pytest
from common import Step
from limits import FLOAT32, INT8, Limits, Mode, bound_by_part, linears_of, num_attended_pairs

from sapwood.kernels import load_kernels
from sapwood.runtime.model_config import ModelConfig, RopeConfig
from sapwood.runtime.models import load_model_class

CONFIG = ModelConfig(
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
    rope=RopeConfig(theta=10000.0),
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
    return Mode(
        config=CONFIG,
        kernels=load_kernels("cpu"),
        linears=linears,
        packed=(None,) * len(linears),
        arithmetic=(arithmetic,) * len(linears),
    )


def limits(float32: float, int8: float, bandwidth: float) -> Limits:
    return Limits(
        ops_by_arithmetic={FLOAT32: float32, INT8: int8},
        read_bandwidth=bandwidth,
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


def test_int8_weights_take_a_quarter_of_the_bytes() -> None:
    rates = limits(1e30, 1e30, 1.0)  # a byte a second, and computing is free
    one_row = step((0,), (1,), 1)
    exact = bound_by_part(mode(FLOAT32), one_row, rates)
    quantized = bound_by_part(mode(INT8), one_row, rates)
    assert exact["linears, float32"] == pytest.approx(4 * quantized["linears, int8"])
    assert exact["head, float32"] == pytest.approx(4 * quantized["head, int8"])


def test_shared_keys_are_read_once_and_multiplied_by_every_row() -> None:
    decode = step((8, 8), (9, 9), 2)  # two requests over the same nine tokens
    layers, heads, kv_heads, head_dim = 3, 3, 1, 4
    reading = bound_by_part(mode(FLOAT32), decode, limits(1e30, 1e30, 1.0))
    assert reading["attention, float32"] == pytest.approx(layers * 2 * kv_heads * head_dim * 4 * 9)
    computing = bound_by_part(mode(FLOAT32), decode, limits(1.0, 1.0, 1e30))
    assert computing["attention, float32"] == pytest.approx(layers * 4 * heads * head_dim * 2 * 9)
