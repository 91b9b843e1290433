"""Steps that are padded and replayed give what they give without, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import AttentionPlan, PrivateSegment
from sapwood.kernels.interface import Kernels, KVCacheSpec
from sapwood.kernels.reference import ReferenceKernels
from sapwood.kernels.staging import Staging
from sapwood.runtime.batch import BatchArrays, BatchBuilder, ForwardBatch
from sapwood.runtime.core import EngineCore
from sapwood.runtime.cuda_graphs import GraphedModel, GraphRecorder, Recording, graph_row_counts
from sapwood.runtime.model_runner import ModelRunner
from sapwood.runtime.models import Model
from sapwood.runtime.weights import load_model
from tests.kernels.test_staging import LateTransfers
from tests.runtime.harness import Harness
from tests.runtime.static_kernels import CheckedRecorder, RowwiseKernels
from tests.runtime.tiny_models import (
    CASES,
    VOCAB_SIZE,
    Chunk,
    PagedSequence,
    Runner,
    random_tokens,
    save_random_model,
)

NUM_BLOCKS = 40
ROW_COUNTS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied_head", tmp_path_factory.mktemp("llama"))


def model_of(case_name: str, folder: Path, kernels: Kernels | None = None) -> Model:
    case = next(c for c in CASES if f"{c.model_type}-{c.name}" == case_name)
    save_random_model(folder, case)
    return load_model(folder, kernels=kernels or RowwiseKernels()).model


class GraphedRunner(Runner):
    """Runs what fits through graphs. Everything static is spoiled between the steps."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        recorder: GraphRecorder | None = None,
        row_counts: Sequence[int] = ROW_COUNTS,
    ) -> None:
        super().__init__(model, kernels, NUM_BLOCKS)
        self.recorder = CheckedRecorder()
        self.graphed = GraphedModel(
            model,
            kernels,
            self.kv,
            recorder or self.recorder,
            row_counts=row_counts,
            vocab_size=VOCAB_SIZE,
            max_context_len=256,
        )
        self.model = self.graphed  # type: ignore[assignment]
        self.num_graphed = 0

    def batch(self, arrays: BatchArrays, plan: AttentionPlan) -> ForwardBatch:
        self.spoil()
        batch = self.graphed.load(arrays, plan)
        if batch is None:
            return super().batch(arrays, plan)
        self.num_graphed += batch.input_ids.data_ptr() == self.graphed._inputs.data_ptr()
        return batch

    def step(self, *chunks: Chunk) -> list[Tensor]:
        return [logits.clone() for logits in super().step(*chunks)]

    def spoil(self) -> None:
        self.graphed._inputs.fill_(2**40)
        self.graphed._logits.fill_(torch.nan)
        scratch = self.kv.spec.scratch_slot
        self.kv.keys[:, scratch:] = torch.nan
        self.kv.values[:, scratch:] = torch.nan


def continue_together(runner: Runner, num_sequences: int, num_steps: int) -> list[Tensor]:
    """Logits of prompts and of steps that more and more sequences share a prefix or leave."""
    first = PagedSequence()
    found = runner.step(Chunk(first, random_tokens(17)))
    sequences = [first, *(first.fork() for _ in range(num_sequences - 1))]
    tokens = iter(random_tokens(1000, seed=1))
    found += runner.step(*(Chunk(s, [next(tokens)] * 2, num_logits=1) for s in sequences[1:]))
    for step in range(num_steps):
        running = sequences[: max(1, num_sequences - step)]
        found += runner.step(*(Chunk(s, [next(tokens)]) for s in running))
    return found


def check_equal(graphed: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(graphed) == len(expected)
    for ours, theirs in zip(graphed, expected, strict=True):
        assert torch.equal(ours, theirs), (ours - theirs).abs().max()


@pytest.mark.parametrize(
    "case_name",
    [
        "llama-yarn_rope",
        "gemma2-soft_caps",
        "gemma3_text-local_and_global_layers",
    ],
)
def test_replayed_steps_have_the_bits_of_steps_without_graphs(
    case_name: str, tmp_path: Path
) -> None:
    model = model_of(case_name, tmp_path)
    expected = continue_together(Runner(model, RowwiseKernels(), NUM_BLOCKS), 5, 4)
    runner = GraphedRunner(model, RowwiseKernels())
    check_equal(continue_together(runner, 5, 4), expected)
    assert runner.num_graphed == runner.recorder.num_replays == 4  # 5, 4, 3 and 2 rows
    assert runner.graphed.num_recorded == 3  # as 8, 4 and 2


def test_graphs_recorded_at_the_start_give_the_same(llama: Model) -> None:
    expected = continue_together(Runner(llama, RowwiseKernels(), NUM_BLOCKS), 3, 2)
    runner = GraphedRunner(llama, RowwiseKernels())
    runner.graphed.record_all()
    assert runner.graphed.num_recorded == len(ROW_COUNTS)
    check_equal(continue_together(runner, 3, 2), expected)


def test_recording_at_the_start_writes_nothing_but_scratch(llama: Model) -> None:
    runner = GraphedRunner(llama, RowwiseKernels())
    runner.kv.keys.fill_(7.0), runner.kv.values.fill_(7.0)
    runner.graphed.record_all()
    for cache in (runner.kv.keys, runner.kv.values):
        assert (cache[:, : runner.kv.spec.num_slots] == 7.0).all()
        assert (cache[:, runner.kv.spec.scratch_slot] != 7.0).any()


def test_drafts_are_rows_like_others(llama: Model) -> None:
    def run(runner: Runner) -> list[Tensor]:
        sequences = [PagedSequence(), PagedSequence()]
        runner.step(*(Chunk(s, random_tokens(9, seed=i)) for i, s in enumerate(sequences)))
        return runner.step(
            Chunk(sequences[0], [5, 6, 7], num_logits=3), Chunk(sequences[1], [8], num_logits=1)
        )

    runner = GraphedRunner(llama, RowwiseKernels())
    check_equal(run(runner), run(Runner(llama, RowwiseKernels(), NUM_BLOCKS)))
    assert runner.num_graphed == 1


@pytest.mark.parametrize("num_logits", [0, 1])
def test_a_step_with_rows_that_want_no_logits_runs_as_ever(llama: Model, num_logits: int) -> None:
    runner = GraphedRunner(llama, RowwiseKernels())
    runner.step(Chunk(PagedSequence(), random_tokens(3), num_logits=num_logits))
    assert runner.num_graphed == 0


def test_a_step_of_more_rows_than_the_largest_graph_runs_as_ever(llama: Model) -> None:
    runner = GraphedRunner(llama, RowwiseKernels(), row_counts=(2,))
    expected = continue_together(Runner(llama, RowwiseKernels(), NUM_BLOCKS), 3, 3)
    check_equal(continue_together(runner, 3, 3), expected)
    assert runner.num_graphed == 2  # of 2 rows and of 1; 3 are too many


def test_a_step_that_the_attention_has_no_room_for_runs_as_ever(llama: Model) -> None:
    expected = continue_together(Runner(llama, RowwiseKernels(), NUM_BLOCKS), 4, 3)
    runner = GraphedRunner(llama, RowwiseKernels(max_tokens=42))
    check_equal(continue_together(runner, 4, 3), expected)
    assert runner.num_graphed == 1  # that of the fewest tokens


def test_a_step_that_the_attention_has_no_room_for_is_planned_by_it_alone(llama: Model) -> None:
    class NotPlanning(RowwiseKernels):
        def plan_attention(self, plan: AttentionPlan, spec: KVCacheSpec) -> Any:
            raise AssertionError("it was planned before")

    fitting = GraphedRunner(llama, RowwiseKernels())
    expected = fitting.graphed.forward(fitting.batch(*one_row(fitting, 11)), fitting.kv)
    runner = GraphedRunner(llama, NotPlanning(max_tokens=0))
    batch = runner.batch(*one_row(runner, 11))
    assert torch.equal(runner.graphed.forward(batch, runner.kv), expected)
    assert (fitting.num_graphed, runner.num_graphed) == (1, 0)


def one_row(runner: Runner, token_id: int, position: int = 0) -> tuple[BatchArrays, AttentionPlan]:
    """A sequence of its own in the first blocks, whose tokens before are there already."""
    block_size = runner.kv.spec.block_size
    num_blocks = position // block_size + 1
    segment = PrivateSegment(
        block_ids=np.arange(num_blocks, dtype=np.int32),
        start=0,
        length=position + 1,
        first_row=0,
        num_rows=1,
    )
    plan = AttentionPlan(num_rows=1, block_size=block_size, shared=(), private=(segment,))
    return BatchArrays(*(np.array([v], np.int64) for v in (token_id, position, position, 0))), plan


def test_tokens_known_on_the_device_alone_are_written_over_a_loaded_batch(llama: Model) -> None:
    runner = GraphedRunner(llama, RowwiseKernels())
    expected = runner.graphed.forward(runner.batch(*one_row(runner, 11)), runner.kv).clone()
    batch = runner.batch(*one_row(runner, 0))
    batch.input_ids[:] = torch.tensor([11])
    assert torch.equal(runner.graphed.forward(batch, runner.kv), expected)


def test_a_loaded_batch_that_was_copied_is_a_mistake(llama: Model) -> None:
    runner = GraphedRunner(llama, RowwiseKernels())
    batch = runner.batch(*one_row(runner, 11))
    copied = ForwardBatch(
        input_ids=batch.input_ids.clone(),
        positions=batch.positions,
        slots=batch.slots,
        logits_rows=batch.logits_rows,
        attention=batch.attention,
    )
    with pytest.raises(AssertionError, match="was replaced"):
        runner.graphed.forward(copied, runner.kv)


def test_kernels_without_static_attention_are_refused(llama: Model) -> None:
    with pytest.raises(ValueError, match="'reference' have no attention for CUDA graphs"):
        GraphedRunner(llama, ReferenceKernels())


def test_a_replay_that_reads_other_memory_than_was_recorded_is_noticed(llama: Model) -> None:
    """Of the tests themselves: the recorder would see a step that is not in static buffers."""
    runner = GraphedRunner(llama, RowwiseKernels())
    runner.graphed.forward(runner.batch(*one_row(runner, 11)), runner.kv)
    batch = runner.batch(*one_row(runner, 11))
    attention = batch.attention
    attention.visible = {w: rows.clone() for w, rows in attention.visible.items()}
    with pytest.raises(AssertionError, match="replayed is"):
        runner.graphed.forward(batch, runner.kv)


@pytest.mark.parametrize(
    ("max_rows", "counts"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_row_counts_end_with_the_largest(max_rows: int, counts: tuple[int, ...]) -> None:
    assert graph_row_counts(max_rows) == counts


def test_a_padded_step_has_less_than_eight_rows_of_padding() -> None:
    counts = graph_row_counts(256)
    assert (len(counts), counts[-1]) == (35, 256)
    for num_rows in range(1, 257):
        assert next(count for count in counts if count >= num_rows) - num_rows < 8


# -- several steps under way -----------------------------------------------------------------------


class LateStream(LateTransfers):
    """Replays are queued behind copies, as on one stream."""

    def record(self, run: Callable[[], None]) -> Recording:
        run()
        return LateRecording(self, run)


@dataclass(eq=False)
class LateRecording:
    stream: LateStream
    run: Callable[[], None]

    def replay(self) -> None:
        self.stream.ask(self.run)


@torch.inference_mode()
def test_steps_that_are_under_way_together_do_not_disturb_each_other(llama: Model) -> None:
    """The host loads step n + 1, and n + 2, before the device has begun with step n."""
    rows = [(token_id, position) for position, token_id in enumerate(random_tokens(12))]
    runner = GraphedRunner(llama, RowwiseKernels())
    expected = [
        runner.graphed.forward(runner.batch(*one_row(runner, *row)), runner.kv).clone()
        for row in rows
    ]
    stream = LateStream()
    kernels = RowwiseKernels()
    late = GraphedModel(
        llama,
        kernels,
        kernels.make_kv_cache(runner.kv.spec),
        stream,
        row_counts=(1,),
        vocab_size=VOCAB_SIZE,
        max_context_len=64,
        staging=Staging(torch.device("cpu"), transfers=stream),
    )
    late.record_all()
    stream.catch_up()
    drawn: list[Tensor] = []
    longest_queue = 0
    for row in rows:
        batch = late.load(*one_row(runner, *row))
        assert batch is not None
        logits = late.forward(batch, late._kv)
        stream.ask(lambda logits=logits: drawn.append(logits.clone()))
        longest_queue = max(longest_queue, len(stream.queue))
    stream.catch_up()
    assert longest_queue >= 8, "at least two steps of four operations were under way"
    check_equal(drawn, expected)


# -- under a scheduler -----------------------------------------------------------------------------


def greedy_tokens(
    model: Model, graphs: GraphedRunner | None, *, overlap: bool = False
) -> tuple[dict[str, list[int]], int]:
    """What a scheduler over the model tells of requests that share, stop and are forked."""
    kernels = graphs.kernels if graphs else RowwiseKernels()
    harness = Harness(block_size=4, num_blocks=NUM_BLOCKS, options={"max_num_batched_tokens": 32,
        "max_num_seqs": 8})  # fmt: skip
    if graphs is None:
        kv = kernels.make_kv_cache(model.kv_spec(NUM_BLOCKS, 4))
        runner = ModelRunner(model, kernels, kv)
    else:
        kv = graphs.kv
        batches = BatchBuilder(kernels, kv.spec, graphs.graphed)
        runner = ModelRunner(graphs.graphed, kernels, kv, batches=batches)
    harness.core = EngineCore(
        harness.scheduler,
        runner,
        clock=lambda: harness.now,
        make_cache=harness.make_cache,
        overlap=overlap,
    )
    prompt = random_tokens(21)
    for index in range(5):
        harness.add([*prompt[: 21 - index], index + 1], max_tokens=6 + index, temperature=0.0)
    harness.add(prompt[:7], max_tokens=5, temperature=1.0, n=2)
    harness.run()
    return harness.answers, harness.scheduler.counters.num_steps


def test_a_scheduler_gets_the_same_tokens_with_graphs(llama: Model) -> None:
    expected, num_steps = greedy_tokens(llama, None)
    graphs = GraphedRunner(llama, RowwiseKernels())
    assert greedy_tokens(llama, graphs) == (expected, num_steps)
    assert graphs.recorder.num_replays >= num_steps - 3
    assert not any(answer == [] for answer in expected.values())
    graphs = GraphedRunner(llama, RowwiseKernels())
    overlapped, _ = greedy_tokens(llama, graphs, overlap=True)
    assert overlapped == expected, "a pending token did not get into the static batch"
    assert graphs.recorder.num_replays >= num_steps - 3
