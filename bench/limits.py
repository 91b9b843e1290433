"""How close does Sapwood come to what the machine can do?

The lower bound of a step's time is counted, not measured. For each part of the forward pass

    bound = max(operations / rate, bytes / bandwidth)        (the roofline: Williams et al. 2009)

and parts follow one another, so that their bounds add up. `share` is bound / measured time.

    linears     2 * rows * inputs * outputs operations, twice that where int8 rounds its rows to 16
                bits (the head); their packed weights are read once. In int8, where every group of
                32 inputs has its own scale and offset, three float32 multiply-adds for each row,
                output and group besides. Behind the last layer's attention, and in the head, only
                rows that have logits count.
    attention   4 * head_dim * query heads operations for each pair of a row and a token it sees;
                keys and values of each distinct token are read once, however many rows share it.
                In the dtype that keys and values are kept in.

Everything else counts as nothing: norms, rotary embedding, softmax, activations, sampling and
scheduling, and in int8 rounding the rows.
The prefill's bound is that of one pass over the prompt, however it is cut into steps.

The rates are measured in the same process, before and after everything else, the best counting:

    GEMM rate   the best of several ways (torch's float32 and bfloat16, oneDNN's packed float32 and
                int8, FBGEMM's int8, Sapwood's own) over the model's shapes at many rows: what a
                step of 32 rows cannot reach. `linears_alone` is what it could: the time of nothing
                but the model's linears, through Sapwood's kernels, at the step's own rows.
    bandwidth   copying a tensor far larger than the caches with all threads, bytes read and written
                together. Beside it `share of reads` takes the fastest read of such a tensor in its
                place, best of a few ways, one row times a matrix by Sapwood's own product among
                them: no step reaches it, which also waits for what it has read.

Besides: the share of wall time that the scheduler, building batches and sampling take in workload
c (workloads.py), from timers around them.

    python bench/limits.py [--modes none int8]
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Step,
    SteppedEngine,
    commit,
    machine,
    make_parser,
    self_times,
    settings,
    spread,
    write_json,
)
from torch import Tensor
from torch.nn import functional
from workloads import Job, WorkloadBuilder

from sapwood import Engine, SamplingParams
from sapwood.kernels import load_kernels
from sapwood.kernels.interface import Kernels
from sapwood.kernels.projections import GROUP, Int8Projection
from sapwood.runtime.build import EngineInfo
from sapwood.runtime.model_config import ModelConfig, read_model_config
from sapwood.runtime.model_runner import ModelRunner
from sapwood.runtime.models import load_model_class
from sapwood.runtime.scheduler import Scheduler
from sapwood.runtime.weights import find_model

CASES = ("prefill", "decode of 32", "decode of 1")
WORKLOAD_OF_CASE = {"prefill": "b", "decode of 32": "c", "decode of 1": "a"}
BAR_OF_CASE = {"prefill": 0.70, "decode of 32": 0.55, "decode of 1": 0.60}
MAX_OVERHEAD = 0.08
GEMM_ROWS = (256, 1024)
BANDWIDTH_BYTES = 2**28
FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
BYTES_OF = {FLOAT32: 4, BFLOAT16: 2}
OPS_PER_GROUP = 6  # float32: by the weights' scale, by the row's, and the offset, each with an add


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine was seen to do at best. Operations and bytes per second."""

    ops_by_arithmetic: dict[str, float]
    copy_bandwidth: float  # bytes read and bytes written together
    read_bandwidth: float

    def best(self, other: "Limits") -> "Limits":
        rates = {
            name: max(rate, other.ops_by_arithmetic[name])
            for name, rate in self.ops_by_arithmetic.items()
        }
        return Limits(
            ops_by_arithmetic=rates,
            read_bandwidth=max(self.read_bandwidth, other.read_bandwidth),
            copy_bandwidth=max(self.copy_bandwidth, other.copy_bandwidth),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer of the model; `for_logits` where only rows that have logits reach it."""

    name: str
    num_inputs: int
    num_outputs: int
    for_logits: bool

    @property
    def num_weights(self) -> int:
        return self.num_inputs * self.num_outputs

    def num_rows(self, step: Step) -> int:
        return step.num_logits if self.for_logits else step.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The model's linears in one mode, in the order in which they are applied."""

    config: ModelConfig
    kernels: Kernels
    linears: tuple[Linear, ...]
    packed: tuple[object, ...]
    kv_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One product of a step: its operations by what they compute in, and the bytes it reads."""

    name: str
    num_ops: dict[str, float]
    num_bytes: float

    def seconds(self, limits: Limits) -> float:
        """The least time it takes."""
        rates = limits.ops_by_arithmetic
        computing = sum(ops / rates[arithmetic] for arithmetic, ops in self.num_ops.items())
        return max(computing, self.num_bytes / limits.copy_bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Something that was timed, and the steps that it had to take at least."""

    seconds: float
    counted: Step
    linears_alone: float  # seconds, at the rows of the steps that were taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One mode's samples by case, and the shares of wall time by where it went."""

    mode: Mode
    samples: dict[str, list[Sample]]
    wall_shares: list[dict[str, float]]


def main() -> None:
    arguments = _parse()
    started = time.perf_counter()
    config = read_model_config(find_model(arguments.model))
    before = measure_limits(config)
    measured = {dtype_of(mode): _measure(arguments, config, mode) for mode in arguments.modes}
    limits = before.best(measure_limits(config))
    result = {
        "question": "how close does Sapwood come to what the machine can do",
        "machine": machine(),
        "commit": commit(),
        "settings": settings(arguments),
        "bars": {**BAR_OF_CASE, "overhead": MAX_OVERHEAD},
        "limits": asdict(limits),
        "dtypes": {name: _summary(one, limits) for name, one in measured.items()},
        "seconds": time.perf_counter() - started,
    }
    write_json(arguments.out, result)
    print(table(result))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name or a folder")
    parser.add_argument(
        "--modes", nargs="+", choices=("none", "int8"), default=["none", "int8"], help="of quantize"
    )
    parser.add_argument(
        "--repetitions", type=int, default=3, help="of prefills, and of c by wall time"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks the workloads")
    parser.add_argument("--out", type=Path, default=RESULTS / "limits.json", help="the result")
    return parser.parse_args()


def dtype_of(quantize: str) -> str:
    """What the linears of a mode are called in a table."""
    return FLOAT32 if quantize == "none" else quantize


# -- the machine's rates -------------------------------------------------------------------------


@torch.inference_mode()
def measure_limits(config: ModelConfig) -> Limits:
    """The best rates of several tries. Takes some seconds."""
    rates = {FLOAT32: 0.0, BFLOAT16: 0.0, INT8: 0.0}
    for linear in _linears_of_a_layer(config, is_last=False):
        for num_rows in GEMM_ROWS:
            num_ops = 2 * num_rows * linear.num_weights
            for arithmetic, product in _products(linear, num_rows):
                rates[arithmetic] = max(rates[arithmetic], num_ops / _best_seconds(product))
    source = torch.ones(BANDWIDTH_BYTES // 4)
    target = torch.empty_like(source)
    row, kernels = torch.ones(1, 4096), load_kernels("cpu")
    reads: list[Callable[[], object]] = [
        source.sum,
        source.max,
        partial(torch.mv, source.view(-1, 4096), row[0]),
        partial(kernels.linear, row, kernels.pack_linear(source.view(-1, 4096))),
    ]
    return Limits(
        ops_by_arithmetic=rates,
        read_bandwidth=BANDWIDTH_BYTES / min(_best_seconds(read) for read in reads),
        copy_bandwidth=2 * BANDWIDTH_BYTES / _best_seconds(partial(target.copy_, source)),
    )


def _products(linear: Linear, num_rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to compute one linear layer, each with its arithmetic."""
    weight = torch.randn(linear.num_outputs, linear.num_inputs)
    x = torch.randn(num_rows, linear.num_inputs)
    kernels = load_kernels("cpu")
    yield FLOAT32, partial(functional.linear, x, weight)
    yield FLOAT32, partial(kernels.linear, x, kernels.pack_linear(weight))
    yield BFLOAT16, partial(functional.linear, x.bfloat16(), weight.bfloat16())
    if (quantized := kernels.quantized()) is not None:
        yield INT8, partial(quantized.linear, x, quantized.pack_linear(weight))
    yield from ((INT8, product) for product in _int8_products(x, weight))


def _int8_products(x: Tensor, weight: Tensor) -> Iterator[Callable[[], object]]:
    """The libraries' int8 products, one scale for all rows: fast, and too coarse to serve with."""
    scale = float(weight.abs().max()) / 127
    int8_weight = (weight / scale).round().to(torch.int8)
    scales = torch.full((len(weight),), scale)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        yield partial(
            torch.ops.onednn.qlinear_pointwise,
            (x * 16 + 128).clamp(0, 255).to(torch.uint8),
            *(1 / 16, 128),
            torch.ops.onednn.qlinear_prepack(int8_weight, None),
            scales,
            torch.zeros(len(weight), dtype=torch.int32),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
    if "fbgemm" in torch.backends.quantized.supported_engines:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors are deprecated, for good here
            quantized = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
            packed = torch.ops.quantized.linear_prepack(quantized, None)
        yield partial(torch.ops.quantized.linear_dynamic, x, packed)


def _best_seconds(call: Callable[[], object], num_calls: int = 5) -> float:
    """The shortest of several calls, after one that is not counted."""
    call()
    seconds = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


# -- what a step has to do -----------------------------------------------------------------------


def linears_of(config: ModelConfig) -> Iterator[Linear]:
    """Every linear layer, in the order in which they are applied."""
    last = config.num_hidden_layers - 1
    for index in range(config.num_hidden_layers):
        yield from _linears_of_a_layer(config, is_last=index == last)
    yield Linear(
        name="head",
        num_inputs=config.hidden_size,
        num_outputs=config.vocab_size,
        for_logits=True,
    )


def _linears_of_a_layer(config: ModelConfig, *, is_last: bool) -> Iterator[Linear]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    for name, num_inputs, num_outputs in (
        ("qkv", hidden, query_size + 2 * kv_size),
        ("output", query_size, hidden),
        ("gate_up", hidden, 2 * intermediate),
        ("down", intermediate, hidden),
    ):
        yield Linear(
            name=name,
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            for_logits=is_last and name != "qkv",
        )


def parts_of(mode: Mode, step: Step) -> Iterator[Part]:
    """What a step has to compute and to read, part by part."""
    for linear, packed in zip(mode.linears, mode.packed, strict=True):
        if num_rows := linear.num_rows(step):
            yield _linear_part(linear, packed, num_rows)
    config, dtype = mode.config, mode.kv_dtype
    ops_per_pair = 4 * config.head_dim * config.num_attention_heads
    values_per_token = 2 * config.head_dim * config.num_key_value_heads
    for _ in range(config.num_hidden_layers):
        yield Part(
            name=f"attention, {dtype}",
            num_ops={dtype: ops_per_pair * num_attended_pairs(step)},
            num_bytes=values_per_token * BYTES_OF[dtype] * step.num_distinct_kv_tokens,
        )


def _linear_part(linear: Linear, packed: object, num_rows: int) -> Part:
    name = "head" if linear.name == "head" else "linears"
    num_ops = 2 * num_rows * linear.num_weights
    if not isinstance(packed, Int8Projection):
        return Part(
            name=f"{name}, {FLOAT32}", num_ops={FLOAT32: num_ops}, num_bytes=4 * linear.num_weights
        )
    num_groups = -(-linear.num_inputs // GROUP)
    return Part(
        name=f"{name}, {INT8}",
        num_ops={
            INT8: num_ops * packed.num_planes,
            FLOAT32: OPS_PER_GROUP * num_rows * linear.num_outputs * num_groups,
        },
        num_bytes=packed.num_bytes,
    )


def num_attended_pairs(step: Step) -> int:
    """Pairs of a row and a token it sees: a row at position p sees p + 1."""
    pairs = zip(step.starts, step.ends, strict=True)
    return sum(end * (end + 1) // 2 - start * (start + 1) // 2 for start, end in pairs)


def bound_by_part(mode: Mode, step: Step, limits: Limits) -> dict[str, float]:
    """Seconds that each kind of part takes at least."""
    seconds: dict[str, float] = {}
    for part in parts_of(mode, step):
        seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds(limits)
    return seconds


# -- measuring -----------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, config: ModelConfig, quantize: str) -> Measured:
    samples: dict[str, list[Sample]] = {case: [] for case in CASES}
    with _noted_layers(type(load_kernels("cpu"))) as packed:
        engine = SteppedEngine(arguments.model, quantize=quantize, kernels="cpu")
    builder = WorkloadBuilder(engine.tokenizer, scale=arguments.scale)
    mode = _mode(engine.info, config, packed)
    _run(engine, builder.build(WORKLOAD_OF_CASE["prefill"], 0))  # warm-up
    for case, workload in WORKLOAD_OF_CASE.items():
        # A prefill gives one sample, a decode each of its steps.
        for repetition in range(arguments.repetitions if case == "prefill" else 1):
            job = builder.build(workload, 1 + repetition)
            steps = _run(engine, job)
            if case == "prefill":
                prompt_len = len(job.requests[0].prompt_ids)
                samples[case].append(_prefill_sample(mode, steps, prompt_len))
            else:
                samples[case] += _decode_samples(mode, steps, len(job.requests))
    del engine
    gc.collect()
    return Measured(
        mode=mode,
        samples=samples,
        wall_shares=_wall_shares(arguments, builder, config, quantize),
    )


def _run(engine: SteppedEngine, job: Job) -> list[Step]:
    """The steps of a workload, from an empty cache."""
    engine.clear()
    for request in job.requests:
        engine.submit(request.prompt_ids, request.max_tokens)
    return engine.run()


def _mode(info: EngineInfo, config: ModelConfig, packed: Sequence[object]) -> Mode:
    linears = tuple(linears_of(config))
    if len(packed) != len(linears):
        raise RuntimeError(
            f"the model packed {len(packed)} linear layers, {len(linears)} were counted: what a "
            "step has to do is out of date here"
        )
    return Mode(
        config=config,
        kernels=load_kernels(info.kernels),
        linears=linears,
        packed=tuple(packed),
        kv_dtype=info.kv_dtype,
    )


@contextmanager
def _noted_layers(kernels: type) -> Iterator[list[object]]:
    """A list of the linear layers that are packed meanwhile: a model's, in its order."""
    packed: list[object] = []
    original = kernels.pack_linear  # type: ignore[attr-defined]

    def pack_linear(self: Kernels, *arguments: Any, **options: Any) -> object:
        packed.append(original(self, *arguments, **options))
        return packed[-1]

    kernels.pack_linear = pack_linear  # type: ignore[attr-defined]
    try:
        yield packed
    finally:
        kernels.pack_linear = original  # type: ignore[attr-defined]


def _prefill_sample(mode: Mode, steps: Sequence[Step], prompt_len: int) -> Sample:
    return Sample(
        seconds=sum(step.seconds for step in steps),
        counted=Step(
            seconds=0.0,
            starts=(0,),
            ends=(prompt_len,),
            num_logits=1,
            num_distinct_kv_tokens=prompt_len,
        ),
        linears_alone=sum(linears_alone(mode, step) for step in steps),
    )


def _decode_samples(mode: Mode, steps: Iterable[Step], num_requests: int) -> list[Sample]:
    """One for each step in which every request decodes."""
    full = [step for step in steps if step.is_decode and step.num_rows == num_requests]
    if not full:
        raise SystemExit("in no step do all requests decode; raise --scale")
    alone = statistics.median(linears_alone(mode, step) for step in full[:5])
    return [Sample(seconds=step.seconds, counted=step, linears_alone=alone) for step in full]


@torch.inference_mode()
def linears_alone(mode: Mode, step: Step) -> float:
    """Seconds of nothing but the model's linears at the step's rows.

    In order, each with its own weights, so that they come from memory as in a step.
    """
    seconds = 0.0
    for linear, packed in zip(mode.linears, mode.packed, strict=True):
        if num_rows := linear.num_rows(step):
            x = torch.randn(num_rows, linear.num_inputs)
            started = time.perf_counter()
            mode.kernels.linear(x, packed)
            seconds += time.perf_counter() - started
    return seconds


def _wall_shares(
    arguments: argparse.Namespace, builder: WorkloadBuilder, config: ModelConfig, quantize: str
) -> list[dict[str, float]]:
    """Shares of the wall time of workload c by where they went, one for each repetition."""
    forward: type = load_model_class(config.model_type)  # type: ignore[assignment]
    methods = (
        (Scheduler, "plan"),
        (Scheduler, "commit"),
        (ModelRunner, "launch"),
        (forward, "forward"),
    )
    shares = []
    with Engine(arguments.model, quantize=quantize) as engine:
        for repetition in range(arguments.repetitions + 1):
            engine.flush_cache()
            requests = builder.build("c", repetition).requests
            prompts = [list(request.prompt_ids) for request in requests]
            sampling = SamplingParams(
                max_tokens=requests[0].max_tokens, temperature=0.0, ignore_eos=True
            )
            with self_times(methods) as seconds:
                started = time.perf_counter()
                engine.generate(prompts, sampling)
                wall = time.perf_counter() - started
            if repetition:
                shares.append({name: spent / wall for name, spent in seconds.items()})
    return shares


# -- results -------------------------------------------------------------------------------------


def _summary(measured: Measured, limits: Limits) -> dict[str, Any]:
    return {
        **{
            case: _case_summary(measured.mode, samples, limits)
            for case, samples in measured.samples.items()
        },
        "overhead": _overhead_summary(measured.wall_shares),
    }


def _case_summary(mode: Mode, samples: Sequence[Sample], limits: Limits) -> dict[str, Any]:
    """Measured times against their bounds; parts are those of the sample in the middle."""
    of_reads = replace(limits, copy_bandwidth=limits.read_bandwidth)
    bounds, lower = (
        [sum(bound_by_part(mode, sample.counted, by).values()) for sample in samples]
        for by in (limits, of_reads)
    )
    pairs = list(zip(samples, bounds, strict=True))
    return {
        "measured_seconds": spread([sample.seconds for sample in samples]),
        "bound_seconds": statistics.median(bounds),
        "bound_seconds_by_part": bound_by_part(mode, samples[len(samples) // 2].counted, limits),
        "share": spread([bound / sample.seconds for sample, bound in pairs]),
        "share_of_reads": statistics.median(
            bound / sample.seconds for sample, bound in zip(samples, lower, strict=True)
        ),
        "linears_alone_seconds": statistics.median(sample.linears_alone for sample in samples),
        "linears_alone_share": spread([s.linears_alone / s.seconds for s in samples]),
    }


def _overhead_summary(shares: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What is not the model's forward pass, by where; `rest` is outside of the core's step."""
    by_name = {name: [one[name] for one in shares] for name in shares[0]}
    [forward] = [name for name in by_name if name.endswith(".forward")]
    step = [sum(v for name, v in one.items() if name != forward) for one in shares]
    names = {
        "Scheduler.plan": "plan",
        "Scheduler.commit": "commit",
        "ModelRunner.launch": "batch_and_sampling",
        forward: "forward",
    }
    return {
        "share": spread(step),
        "share_by_part": {names[name]: statistics.median(by_name[name]) for name in by_name},
        "rest": statistics.median(1 - sum(one.values()) for one in shares),
    }


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    limits = result["limits"]
    rates = limits["ops_by_arithmetic"]
    rows = [
        f"Limits: {rates[FLOAT32] / 1e9:.0f} GFLOP/s in float32, "
        f"{rates[BFLOAT16] / 1e9:.0f} in bfloat16, {rates[INT8] / 1e9:.0f} GOP/s in int8, "
        f"copies {limits['copy_bandwidth'] / 1e9:.1f} GB/s, reads "
        f"{limits['read_bandwidth'] / 1e9:.1f} GB/s.",
        "",
        "| case | dtype | measured, ms | bound, ms | share (quartiles) | bar | share of reads "
        "| linears alone, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for dtype, cases in result["dtypes"].items():
            one = cases[case]
            rows.append(
                f"| {case} | {dtype} | {one['measured_seconds']['median'] * 1e3:.1f} "
                f"| {one['bound_seconds'] * 1e3:.1f} | {_percent(one['share'])} "
                f"| {result['bars'][case]:.0%} | {one['share_of_reads']:.0%} "
                f"| {one['linears_alone_seconds'] * 1e3:.1f} |"
            )
    rows.append("")
    for dtype, cases in result["dtypes"].items():
        overhead = cases["overhead"]
        share = {name: f"{value:.1%}" for name, value in overhead["share_by_part"].items()}
        rows.append(
            f"- Scheduler, batches and sampling in workload c, {dtype}: "
            f"{_percent(overhead['share'])} of wall time, where the bar is "
            f"{result['bars']['overhead']:.0%}: plan {share['plan']}, "
            f"batches and sampling {share['batch_and_sampling']}, commit {share['commit']}; "
            f"the forward pass takes {share['forward']}, the rest {overhead['rest']:.1%}."
        )
    return "\n".join(rows)


def _percent(share: dict[str, float]) -> str:
    return f"{share['median']:.1%} ({share['first_quartile']:.1%} to {share['third_quartile']:.1%})"


if __name__ == "__main__":
    main()
