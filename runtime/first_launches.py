"""What steps ask of a GPU now and then, asked for once before there are requests.

A Triton kernel is compiled, or read from where compiled ones are kept, when it is first launched,
which takes as long as many steps. The memory trial and the graphs launch what large steps and
graphs are made of. What is left are the kernels of a few rows without a graph, masks and copies.
Kernels for CPUs are there once they are loaded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sapwood.kernels.interface import Kernels, KVCache, RowCopy
from sapwood.kernels.staging import send
from sapwood.runtime.memory_trial import StepLimits, largest_batch
from sapwood.runtime.models import Model


@torch.inference_mode()
def launch_the_rest(model: Model, kernels: Kernels, kv: KVCache, limits: StepLimits) -> None:
    """A row that decodes at the end of the longest context, a mask, and a copy between blocks.

    Over the cache that requests will have, since a kernel may be compiled for strides of it; what
    is in that is overwritten. Cost: a step of one row.
    """
    logits = model.forward(largest_batch(kernels, kv, replace(limits, num_rows=1)), kv)
    allowed = np.zeros((1, -(-logits.shape[1] // 32)), np.int32)
    sent = send({"rows": np.zeros(1, np.int64), "allowed": allowed}, logits.device)
    kernels.mask_logits(logits, sent["rows"], sent["allowed"])
    if kv.spec.num_blocks > 1:
        kernels.copy_rows(kv, [RowCopy(source=0, target=1, num_rows=1)])
