"""Steps of few rows as CUDA graphs: recorded once, then replayed with one call.

A decoding step of a small model is hundreds of kernels of a few microseconds each, and launching
them one by one takes the host longer than the device needs to run them. A graph is launched whole.
It repeats what was recorded to the address: the same kernels, in the same grids, on the same
memory. So all that differs between two steps lies in buffers that stay where they are:

    static    input_ids, positions, slots, logits_rows    one set, for the largest graph
              attention                                   one for each row count, of the kernels
              logits                                      one, for the largest graph

Only a few row counts are recorded. A step is padded to the next one: rows that are nobody's have
token 0 at position 0, write their keys to the cache's scratch slot and attend to nothing. What
comes out of them is undefined, and no row sees it. Steps of more rows, or of rows without logits
(prompts), run as ever.

Why a step is never disturbed by the next one, though the host may prepare that while the device
works: everything is queued on one stream, which runs in order.

    load n | forward n | draw n | load n+1 | forward n+1 | draw n+1

`load n+1` overwrites the static inputs behind the last kernel that reads them for step n, and
`forward n+1` overwrites the logits behind the kernels that draw from them. What the host writes
meanwhile are page-locked buffers, none of them before a copy out of it has ended (kernels/
staging.py). So whoever reads logits queues that before the next forward pass, and no later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels, KVCache, StaticAttention
from sapwood.kernels.segments import AttentionPlan
from sapwood.kernels.staging import Staging
from sapwood.runtime.batch import BatchArrays, ForwardBatch
from sapwood.runtime.errors import ConfigError
from sapwood.runtime.model_runner import Model

_FIRST_ROW_COUNTS = (1, 2, 4)
_ROW_COUNT_STEP = 8  # at most 7 rows of padding: rows cost little beside the weights they share
_ALIGNED_ROWS = 16  # of int64: every static buffer begins at an address that wide loads can take


class Recording(Protocol):
    """Work of the device that was noted."""

    def replay(self) -> object:
        """Queue it on the current stream."""
        ...


class GraphRecorder(Protocol):
    """Notes what a function asks of the device."""

    def record(self, run: Callable[[], None]) -> Recording:
        """`run` has the same effect however often it is called, reads nothing back to the host,
        and its tensors other than those it makes itself stay where they are. It may be called
        several times."""
        ...


def graph_row_counts(max_rows: int) -> tuple[int, ...]:
    """The row counts to record for steps of up to `max_rows` rows, ascending; `max_rows` is one."""
    more = range(_ROW_COUNT_STEP, max_rows, _ROW_COUNT_STEP)
    return (*(count for count in (*_FIRST_ROW_COUNTS, *more) if count < max_rows), max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Which steps of a model become graphs, recorded by what, and whether before any request.

    Every model with graphs gets a recorder of its own, so that what one took is free when it goes.
    """

    row_counts: tuple[int, ...]  # ascending
    vocab_size: int
    max_context_len: int  # tokens that a row may see
    make_recorder: Callable[[], GraphRecorder]
    at_start: bool

    def over(
        self, model: Model, kernels: Kernels, kv: KVCache, row_counts: tuple[int, ...] = ()
    ) -> GraphedModel:
        """The model with graphs over `kv`, of some row counts or of all."""
        return GraphedModel(
            model,
            kernels,
            kv,
            self.make_recorder(),
            row_counts=row_counts or self.row_counts,
            vocab_size=self.vocab_size,
            max_context_len=self.max_context_len,
        )


class GraphedModel:
    """A `Model` that replays what `load` took, and passes everything else on to the model it wraps.

    Belongs to one thread and one stream. `load` and `forward` alternate: a loaded batch is the next
    that is run.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        kv: KVCache,
        recorder: GraphRecorder,
        *,
        row_counts: Iterable[int],
        vocab_size: int,
        max_context_len: int,
        staging: Staging | None = None,
    ) -> None:
        """Graphs over `kv` for steps that are padded to one of `row_counts`; none is recorded yet.

        Raises ValueError where the kernels have no static attention. Allocates the static buffers,
        which `staging` fills (one of their device, if it is not given).
        """
        self._model, self._kv, self._recorder = model, kv, recorder
        device = kv.spec.device
        self._staging = staging or Staging(device)
        self._graphs = [
            _Graph(count, _static_attention(kernels, kv, count, max_context_len, self._staging))
            for count in sorted(row_counts)
        ]
        max_rows = -(-self.max_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS
        self._inputs = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(max_rows, device=device)
        self._logits = torch.empty(self.max_rows, vocab_size, dtype=torch.float32, device=device)
        self._loaded: _Loaded | None = None

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(graph.num_rows for graph in self._graphs)

    @property
    def max_rows(self) -> int:
        """Rows of the largest graph."""
        return self._graphs[-1].num_rows

    @property
    def num_recorded(self) -> int:
        """Graphs that there are so far."""
        return sum(graph.recording is not None for graph in self._graphs)

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every graph now rather than when it is first needed. Seconds, on a GPU.

        The rows are padding, so that nothing is written but the scratch slot.
        """
        self._fill(BatchArrays(*np.empty((4, 0), np.int64)))
        # The largest comes first: the memory that it takes while it runs is enough for the others.
        for graph in reversed(self._graphs):
            self._record(graph)

    def load(self, arrays: BatchArrays, plan: AttentionPlan) -> ForwardBatch | None:
        """The batch in static buffers if there is a graph for it, None if there is not; in tensors
        of its own where the graph has no room for its attention.

        The first rows of static buffers may be overwritten in place until the forward pass, and are
        overwritten by the next `load`.
        """
        num_rows = len(arrays.input_ids)
        if num_rows > self.max_rows or len(arrays.logits_rows) != num_rows:
            return None
        graph = next(graph for graph in self._graphs if graph.num_rows >= num_rows)
        attention = graph.attention.load(plan)
        if attention is not graph.attention:
            return arrays.sent(self._staging, attention)
        self._fill(arrays)
        batch = self._batch(graph, num_rows)
        self._loaded = _Loaded(batch, graph)
        return batch

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [num_logits, vocab_size]; of a loaded batch a view of a static buffer.

        Valid for what is queued before the next call.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None or batch is not loaded.batch:
            assert loaded is None or batch.attention is not loaded.graph.attention, (
                "a loaded batch was replaced, it can only be overwritten in place"
            )
            return self._model.forward(batch, kv)
        assert kv is self._kv, "graphs were recorded over another cache"
        graph = loaded.graph
        recording = graph.recording or self._record(graph)
        recording.replay()
        return self._logits[: len(batch.input_ids)]

    def _fill(self, arrays: BatchArrays) -> None:
        """The static inputs become those of `arrays`, and padding behind them."""
        num_rows = len(arrays.input_ids)
        padded = np.zeros(self._inputs.shape, np.int64)
        padded[:, :num_rows] = arrays.input_ids, arrays.positions, arrays.slots
        padded[2, num_rows:] = self._kv.spec.scratch_slot
        self._staging.send_into(self._inputs, padded)

    def _batch(self, graph: _Graph, num_rows: int) -> ForwardBatch:
        """The first rows of the static buffers. All their logits are wanted."""
        input_ids, positions, slots = self._inputs[:, :num_rows]
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            logits_rows=self._all_rows[:num_rows],
            attention=graph.attention,
        )

    def _record(self, graph: _Graph) -> Recording:
        """Record a graph with what is in the static buffers. Doing that step twice is harmless: it
        writes the same keys and values, and reads none that it does not write or that change."""
        batch = self._batch(graph, graph.num_rows)

        def run() -> None:
            # The copy moves 8 bytes a logit, 0.3 GB for 256 rows of 152,000 tokens. Without it each
            # graph would keep its own logits for ever: 2.6 GB for all row counts up to that.
            self._logits[: graph.num_rows].copy_(self._model.forward(batch, self._kv))

        graph.recording = self._recorder.record(run)
        return graph.recording


@dataclass(slots=True, eq=False)
class _Graph:
    """Steps padded to `num_rows`. `GraphedModel` records it."""

    num_rows: int
    attention: StaticAttention
    recording: Recording | None = None


class _Loaded(NamedTuple):
    """The step whose forward pass comes next."""

    batch: ForwardBatch
    graph: _Graph


def _static_attention(
    kernels: Kernels, kv: KVCache, num_rows: int, max_context_len: int, staging: Staging
) -> StaticAttention:
    attention = kernels.static_attention(kv.spec, num_rows, max_context_len, staging)
    if attention is None:
        raise ValueError(f"the kernels {kernels.name!r} have no attention for CUDA graphs")
    return attention


class CudaGraphRecorder:
    """Records CUDA graphs, which share the memory that they take while they run.

    That holds as long as none runs beside another and nothing that one made is read after the next
    has begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Recording:
        """Raises ConfigError for what a graph cannot hold."""
        self._warm_up(run)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may ask the device for memory meanwhile, which a recording in the
            # global mode would forbid them.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"a step could not be recorded as a CUDA graph: {error}; set cuda_graphs to none"
            ) from error
        return graph

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Once without recording: what is compiled, loaded or allocated at a first call cannot be
        recorded. On the stream of the recording, for which cuBLAS takes its workspace."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
