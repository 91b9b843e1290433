"""Builds the C files of csrc/ with the machine's C compiler, once, and binds its functions.

Where there is no compiler, or it fails, `load` gives None and kernels/cpu.py does with torch's
operations: the same results but for rounding, more slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.interface import Activation
from sapwood.kernels.user_cache import cache_folder

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).with_name("csrc")
# Sums are in the order that the code says: a row's bits must not depend on the loop that it is in.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-shared",
    "-fPIC",
)
_BUILD_SECONDS = 180
_MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 8  # of attention.c's tiles
_MAX_CUTS = 16  # likewise
TOKENS_PER_BLOCK = 128  # TOKENS of attention.c
_NOTHING_SEEN = -1e38  # likewise
_UNGATED = 0  # of common.h, as the numbers of the activations
_ACTIVATIONS = MappingProxyType({Activation.SILU: 1, Activation.GELU_TANH: 2})
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ROWS = (_POINTER, _POINTER, _FLOAT, _INT, _INT, _INT)  # x, norm, eps, activation, rows, inputs
_HEADS = (_POINTER, _INT, _POINTER, _POINTER, _INT)  # query, its stride, keys, values, is_bf16
_SIGNATURES = MappingProxyType(
    {
        "rms_norm": (_POINTER, _INT, _POINTER, _FLOAT, *(_INT,) * 3, _POINTER),
        "float32_num_floats": (_INT, _INT),
        "float32_pack": (_POINTER, _INT, _INT, _POINTER),
        "float32_linear": (*_ROWS, _POINTER, _INT, *(_POINTER,) * 3),
        "int8_num_bits": (_POINTER, _INT, _INT),
        "int8_num_bytes": (_INT, _INT, _INT),
        "int8_pack": (_POINTER, _INT, _INT, _INT, _POINTER),
        "int8_unpack": (_POINTER, _INT, _INT, _INT, _POINTER),
        "int8_linear": (*_ROWS, _POINTER, *(_INT,) * 3, *(_POINTER,) * 3),
        "activate_and_mul": (_POINTER, *(_INT,) * 3, _POINTER),
        "rotary": (_POINTER, *(_INT,) * 5, *(_POINTER,) * 3),
        "write_kv": (*(_POINTER, _INT) * 2, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT),
        "mask_logits": (_POINTER, _INT, _POINTER, _INT, _POINTER, _INT),
        "attend_rows": (*_HEADS, *(_POINTER,) * 7, *(_INT,) * 5, _FLOAT, _FLOAT, *(_POINTER,) * 2),
        "attend_tails": (*_HEADS, *(_POINTER,) * 5, *(_INT,) * 4, _FLOAT, _FLOAT, *(_POINTER,) * 5),
        "add_sinks": (_POINTER, _POINTER, *(_INT,) * 3, _POINTER),
        "has_bf16": (),
    }
)
_WITH_RESULT = frozenset(
    {
        "float32_num_floats",
        "float32_linear",
        "int8_num_bits",
        "int8_num_bytes",
        "int8_linear",
        "has_bf16",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSegments:
    """Segments of which no two have a row in common.

    Segment s is the query rows `rows[first_rows[s] : first_rows[s + 1]]`. Of the slots from
    `first_slots[s]` on each sees those from `begins` (None: the first) up to `ends`, one at least.
    `is_first` [num_segments] says that its rows have no state yet, `is_last` that they see nothing
    after. All tensors int64.
    """

    rows: Tensor
    begins: Tensor | None
    ends: Tensor
    slots: Tensor
    first_rows: Tensor
    first_slots: Tensor
    is_first: Tensor
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails:
    """The last tokens of single rows: `rows[p]` over `slots[first_slots[p] : first_slots[p + 1]]`.

    `first_blocks` [num_parts + 1] counts blocks of TOKENS_PER_BLOCK slots, the last of a part not
    full; `num_blocks` is its last. All tensors int64.
    """

    rows: Tensor
    is_first: Tensor
    slots: Tensor
    first_slots: Tensor
    first_blocks: Tensor
    num_blocks: int


Take = Callable[[int], Tensor]  # of a number of bytes, uint8 from the start of a cache line


class AttentionState(NamedTuple):
    """What rows have of the tokens so far; results after the last.

    sums [T, Hq, D] of weighted values; totals [T, Hq, 2], exponents and sums of weights. float32.
    """

    sums: Tensor
    totals: Tensor

    @classmethod
    def undefined(cls, query: Tensor) -> AttentionState:
        """For rows of which each segment and tail says which have seen nothing before."""
        return cls(query.new_empty(query.shape), query.new_empty(*query.shape[:2], 2))

    @classmethod
    def of_nothing(cls, query: Tensor) -> AttentionState:
        """For rows that begin wherever it may be."""
        totals = query.new_zeros(*query.shape[:2], 2)
        totals[..., 0] = _NOTHING_SEEN
        return cls(query.new_zeros(query.shape), totals)


class Native:
    """The functions of csrc/ on float32 tensors; each allocates what it returns.

    The callers see to it that the last axis is contiguous, and rows where no stride is passed.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        functions = []
        for name, signature in _SIGNATURES.items():
            function = library[f"sapwood_{name}"]
            function.argtypes = signature
            function.restype = _INT if name in _WITH_RESULT else None
            functions.append(function)
        (
            self._rms_norm,
            self._float32_num_floats,
            self._float32_pack,
            self._float32_linear,
            self._int8_num_bits,
            self._int8_num_bytes,
            self._int8_pack,
            self._int8_unpack,
            self._int8_linear,
            self._activate_and_mul,
            self._rotary,
            self._write_kv,
            self._mask_logits,
            self._attend_rows,
            self._attend_tails,
            self._add_sinks,
            has_bf16,
        ) = functions
        self._has_bf16 = bool(has_bf16())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis of x [rows, n] or [rows, num_heads, n], its rows any stride apart."""
        out = x.new_empty(x.shape)
        num_heads = 1 if x.dim() == 2 else x.shape[1]
        self._rms_norm(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            eps,
            len(x),
            num_heads,
            x.shape[-1],
            out.data_ptr(),
        )
        return out

    def float32_pack(self, weight: Tensor, take: Take) -> Tensor:
        """weight [out, in] in the layout of float32.c."""
        packed = take(4 * self._float32_num_floats(*weight.shape)).view(torch.float32)
        self._float32_pack(weight.data_ptr(), *weight.shape, packed.data_ptr())
        return packed

    def float32_linear(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None,
        activation: Activation | None,
        num_inputs: int,
        packed: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """Fill out [rows, out]; see float32.c. `norm` is a weight [in] and an epsilon."""
        status = self._float32_linear(
            *_rows(x, norm, activation, num_inputs),
            packed.data_ptr(),
            out.shape[1],
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        if status:
            raise MemoryError(f"no memory to prepare {len(x)} rows of {num_inputs} inputs")

    def int8_num_bits(self, weight: Tensor) -> int:
        """4 where weight [out, in] loses nothing by it, else 8."""
        num_bits: int = self._int8_num_bits(weight.data_ptr(), *weight.shape)
        return num_bits

    def int8_pack(self, weight: Tensor, num_bits: int, take: Take) -> Tensor:
        """weight [out, in] rounded, uint8 in the layout of int8.c."""
        packed = take(self._int8_num_bytes(*weight.shape, num_bits))
        self._int8_pack(weight.data_ptr(), *weight.shape, num_bits, packed.data_ptr())
        return packed

    def int8_unpack(self, packed: Tensor, num_bits: int, weight: Tensor) -> None:
        """Fill weight [out, in] with what was packed."""
        self._int8_unpack(packed.data_ptr(), *weight.shape, num_bits, weight.data_ptr())

    def int8_linear(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None,
        activation: Activation | None,
        num_inputs: int,
        packed: Tensor,
        num_bits: int,
        num_planes: int,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """Fill out [rows, out]; see int8.c. `norm` is a weight [in] and an epsilon."""
        status = self._int8_linear(
            *_rows(x, norm, activation, num_inputs),
            packed.data_ptr(),
            num_bits,
            out.shape[1],
            num_planes,
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        if status:
            raise MemoryError(f"no memory to round {len(x)} rows of {num_inputs} inputs")

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [rows, 2 n]."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, n)
        self._activate_and_mul(
            gate_up.data_ptr(), _ACTIVATIONS[activation], rows, n, out.data_ptr()
        )
        return out

    def rotary(self, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """heads [rows, num_heads, dim], its rows any stride apart; the others contiguous."""
        rows, num_heads, dim = heads.shape
        out = heads.new_empty(rows, num_heads, dim)
        self._rotary(
            heads.data_ptr(),
            heads.stride(0),
            rows,
            num_heads,
            dim,
            cosines.shape[-1],
            cosines.data_ptr(),
            sines.data_ptr(),
            out.data_ptr(),
        )
        return out

    def write_kv(
        self, key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """key and value [rows, num_kv_heads, dim], their rows any stride apart.

        keys and values [num_slots, num_kv_heads, dim], float32 or bfloat16 (rounded to nearest).
        """
        rows, num_kv_heads, dim = key.shape
        self._write_kv(
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            slots.data_ptr(),
            rows,
            num_kv_heads * dim,
            keys.data_ptr(),
            values.data_ptr(),
            keys.dtype == torch.bfloat16,
        )

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        """logits [*, vocab_size], rows int64 [m], allowed int32 [m, words]; all contiguous."""
        self._mask_logits(
            logits.data_ptr(),
            logits.shape[1],
            rows.data_ptr(),
            len(rows),
            allowed.data_ptr(),
            allowed.shape[1],
        )

    def can_attend(self, kv_dtype: torch.dtype, head_dim: int) -> bool:
        """Whether `attend_rows` and `attend_tails` take such keys and values."""
        fits = head_dim <= _MAX_HEAD_DIM and head_dim % _HEAD_DIM_STEP == 0
        has_products = kv_dtype == torch.bfloat16 and self._has_bf16
        return fits and (kv_dtype == torch.float32 or has_products)

    def attend_rows(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        segments: RowSegments,
        scale: float,
        softcap: float | None,
        state: AttentionState,
    ) -> None:
        """Go on with the segments' rows in `state`.

        query [T, Hq, D], its rows any stride apart; keys and values [num_slots, Hkv, D], float32 or
        bfloat16. All others are float32.
        """
        num_kv_heads, dim = keys.shape[1:]
        self._attend_rows(
            *_heads(query, keys, values),
            segments.rows.data_ptr(),
            None if segments.begins is None else segments.begins.data_ptr(),
            segments.ends.data_ptr(),
            segments.slots.data_ptr(),
            segments.first_rows.data_ptr(),
            segments.first_slots.data_ptr(),
            segments.is_first.data_ptr(),
            segments.is_last,
            len(segments.is_first),
            num_kv_heads,
            query.shape[1] // num_kv_heads,
            dim,
            scale,
            softcap or 0.0,
            state.sums.data_ptr(),
            state.totals.data_ptr(),
        )

    def attend_tails(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tails: Tails,
        scale: float,
        softcap: float | None,
        state: AttentionState,
    ) -> Tensor:
        """Finish single rows in the sums of `state`; the rest as in `attend_rows`.

        Returns their totals [num_parts, Hq, 2], which are not stored.
        """
        num_kv_heads, dim = keys.shape[1:]
        num_blocks, num_heads = tails.num_blocks, query.shape[1]
        weights = query.new_empty(num_blocks, num_heads, TOKENS_PER_BLOCK)
        exponents = query.new_empty(num_blocks, num_heads)
        running = query.new_empty(len(tails.rows), num_heads, _MAX_CUTS, 2)
        self._attend_tails(
            *_heads(query, keys, values),
            tails.rows.data_ptr(),
            tails.is_first.data_ptr(),
            tails.first_slots.data_ptr(),
            tails.first_blocks.data_ptr(),
            tails.slots.data_ptr(),
            len(tails.rows),
            num_kv_heads,
            num_heads // num_kv_heads,
            dim,
            scale,
            softcap or 0.0,
            state.sums.data_ptr(),
            state.totals.data_ptr(),
            weights.data_ptr(),
            exponents.data_ptr(),
            running.data_ptr(),
        )
        return running[:, :, 0]

    def add_sinks(self, state: AttentionState, sinks: Tensor) -> None:
        """Results in `state` beside one more token of each head, of score sinks [Hq], no value."""
        self._add_sinks(
            state.totals.data_ptr(), sinks.data_ptr(), *state.sums.shape, state.sums.data_ptr()
        )


def _rows(
    x: Tensor, norm: tuple[Tensor, float] | None, activation: Activation | None, num_inputs: int
) -> tuple[int, int | None, float, int, int, int]:
    weight, eps = (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    number = _UNGATED if activation is None else _ACTIVATIONS[activation]
    return x.data_ptr(), weight, eps, number, len(x), num_inputs


def _heads(query: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int, int, int, bool]:
    return (
        query.data_ptr(),
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        keys.dtype == torch.bfloat16,
    )


def has_whole_rows(*tensors: Tensor) -> bool:
    """Whether each row of these [rows, n] or [rows, heads, dim] is contiguous."""
    return all(t.stride(-1) == 1 and (t.dim() == 2 or t.stride(1) == t.shape[2]) for t in tensors)


def load() -> Native | None:
    """The functions, built first if they are not in the user's cache, which takes seconds."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        logger.info("there is no C compiler, so torch's operations are used; one makes it faster")
        return None
    try:
        return Native(ctypes.CDLL(str(build(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("csrc/ could not be built (%s), so torch's operations are used", error)
        return None


def build(compiler: str, more_flags: Sequence[str] = ()) -> Path:
    """The shared library of csrc/, compiled unless it is in the user's cache.

    Raises OSError and subprocess.SubprocessError.
    """
    files = sorted(_FOLDER.iterdir())
    sources = [str(path) for path in files if path.suffix == ".c"]
    command = [compiler, *_FLAGS, *_vector_flags(), *more_flags, *sources, *_openmp(), "-lm"]
    digest = hashlib.sha256("\0".join([*command, _processor(), torch.__version__]).encode())
    for path in files:
        digest.update(path.read_bytes())
    key = digest.hexdigest()[:24]
    target = cache_folder() / "native" / f"{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unfinished = Path(folder) / target.name
            subprocess.run(
                [*command, "-o", str(unfinished)],
                check=True,
                capture_output=True,
                timeout=_BUILD_SECONDS,
            )
            unfinished.replace(target)  # whole or not at all, whoever else builds it
    return target


def _vector_flags() -> Sequence[str]:
    # Compilers prefer half of AVX-512's width where they do not know the processor.
    return ["-mprefer-vector-width=512"] if torch.cpu._is_avx512_supported() else []


def _openmp() -> Sequence[str]:
    """torch's own OpenMP library: a second one would have workers that get in the first's way."""
    return [
        str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    ]


def _processor() -> str:
    """What -march=native stands for; a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
