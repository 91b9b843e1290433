"""The longer trial against transformers' own attention, on request.

Prompts are longer than every window that the model has. They are computed in pieces and token by
token beside each other, over scattered blocks, as the engine would, and alone by transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.errors import UnsupportedModelError
from sapwood.runtime.universal.gate import TOLERANCES, check_close, eager_logits
from sapwood.runtime.universal.model import UniversalModel
from sapwood.runtime.universal.network import Network
from sapwood.runtime.universal.paged import Chunk, MadeUpSequence, PagedTrial, made_up_tokens

_NUM_PROMPTS = 3
_MIN_LEN = 64  # tokens
_NUM_DECODED = 3
_MAX_LEN = 8192  # transformers' own attention holds a score for every pair of tokens and head


def verify(model: UniversalModel, network: Network, kernels: Kernels) -> None:
    """Compare logits on long prompts. Raises UnsupportedModelError with the reason as a clause.

    Cost: three prompts a quarter longer than the largest window, twice.
    """
    config = model.config
    window = max((w for w in model.kv_spec(1, 1).windows if w is not None), default=0)
    length = min(max(_MIN_LEN, window + window // 4 + 9), config.max_position_embeddings)
    if length > _MAX_LEN:
        raise UnsupportedModelError(
            f"to verify its window of {window} tokens takes prompts of {length}, and transformers' "
            f"own attention is tried up to {_MAX_LEN}; it may be loaded without verify_model"
        )
    prompts = [
        made_up_tokens(max(1, length - index), config.vocab_size, seed=10 + index)
        for index in range(_NUM_PROMPTS)
    ]
    for prompt, logits in zip(prompts, paged_logits(model, kernels, prompts), strict=True):
        reason = (
            f"its logits for {len(prompt)} tokens over paged attention are not those over "
            "transformers' own attention"
        )
        check_close(logits, eager_logits(network, prompt), TOLERANCES[network.dtype], reason)


def paged_logits(
    model: UniversalModel, kernels: Kernels, prompts: list[list[int]]
) -> Iterator[Tensor]:
    """Logits of each prompt, computed in pieces: prompt n starts n steps after the first."""
    trial = PagedTrial(model, kernels, sum(map(len, prompts)))
    sequences = [MadeUpSequence() for _ in prompts]
    pieces = [_pieces(prompt) for prompt in prompts]
    computed: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(max(map(len, pieces)) + len(prompts) - 1):
        active = [i for i in range(len(prompts)) if 0 <= step - i < len(pieces[i])]
        chunks = [Chunk(sequence=sequences[i], token_ids=pieces[i][step - i]) for i in active]
        for index, logits in zip(active, trial.step(*chunks), strict=True):
            computed[index].append(logits)
    yield from map(torch.cat, computed)


def _pieces(prompt: list[int]) -> list[list[int]]:
    """Two chunks, then tokens one by one; fewer where the prompt is short."""
    half, decoded = len(prompt) // 2, max(len(prompt) // 2, len(prompt) - _NUM_DECODED)
    chunks = [prompt[:half], prompt[half:decoded]]
    return [chunk for chunk in chunks if chunk] + [[token] for token in prompt[decoded:]]
