"""What is tried before a model of transformers may serve: a few forward passes over few tokens.

Nothing tells from outside whether an architecture computes the same over paged attention: some
never call the attention function, some put a window into the mask alone, some count the rows of the
batch where they should take positions. So the model is first watched (what does every layer ask of
attention, and is it what paged attention gives), and then tried: sequences in one flattened batch
must have the logits that each has alone with transformers' own attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sapwood.kernels.interface import Kernels
from sapwood.runtime.errors import UnsupportedModelError
from sapwood.runtime.universal.attention import using_attention
from sapwood.runtime.universal.model import AttentionLayout, UniversalConfig, UniversalModel
from sapwood.runtime.universal.network import Network, quotation
from sapwood.runtime.universal.paged import Chunk, MadeUpSequence, PagedTrial, made_up_tokens
from sapwood.runtime.universal.probe import (
    PROBE,
    AttentionCall,
    Mask,
    Probe,
    probing,
    register_probe,
)

EAGER = "eager"
_PROBE_LEN = 8
_SHORT_LEN, _OTHER_LEN = 11, 7
_MAX_SHORT_WINDOW = 128  # prompts of the trial are longer than windows up to this
# The root of the mean square of differences, in standard deviations of the logits. Batches of the
# same shape are rounded alike, so that between those hardly anything but a mistake differs.
TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
)
_SAME_SHAPE_TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
)

# The same batch, computed twice: only atomic additions on a GPU may round it in another way.
_REPEAT_TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
)


def admit(config: UniversalConfig, network: Network, kernels: Kernels) -> UniversalModel:
    """The model over `kernels`, tried. Raises UnsupportedModelError with the reason as a clause.

    Cost: about eleven forward passes over some ten tokens.
    """
    layout = _watch(config, network)
    model = UniversalModel(config, network, layout, kernels)
    _try_out(model, network, kernels)
    return model


@contextmanager
def _quoted(where: str) -> Iterator[None]:
    """Whatever a forward pass inside raises is a reason that quotes it."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"its forward pass fails {where}: {quotation(error)}"
        ) from error


# -- watching ------------------------------------------------------------------------------------


def _watch(config: UniversalConfig, network: Network) -> AttentionLayout:
    """What the layers ask of attention, if paged attention gives all of it."""
    probe = _probe(config, network)
    calls = _one_call_of_each_layer(config, network, probe)
    for call in calls:
        _check_arguments(call)
        _check_mask(config, probe, call)
    return _layout(calls, config.max_position_embeddings)


def _probe(config: UniversalConfig, network: Network) -> Probe:
    register_probe()
    device = network.device
    ids = torch.tensor(made_up_tokens(_PROBE_LEN, config.vocab_size, seed=0), device=device)
    positions = torch.arange(_PROBE_LEN, device=device)
    with torch.inference_mode(), using_attention(network.module, PROBE), probing() as probe:
        with _quoted("on one short sequence"):
            network.logits(ids, positions, positions)
    return probe


def _one_call_of_each_layer(
    config: UniversalConfig, network: Network, probe: Probe
) -> list[AttentionCall]:
    """The calls in the order of the layers, each of which called once."""
    layers = sorted(call.layer for call in probe.calls)
    num_layers = config.num_hidden_layers
    if not layers:
        raise UnsupportedModelError(
            f"{type(network.module).__name__} computes attention by itself, or has none, and never "
            "calls the function that paging takes the place of"
        )
    if silent := sorted(set(range(num_layers)) - set(layers)):
        raise UnsupportedModelError(
            f"{len(silent)} of its {num_layers} layers call no attention (the first is layer "
            f"{silent[0]}): they mix tokens in another way, which paging does not see"
        )
    if layers != list(range(num_layers)):
        twice = next((n for n in layers if layers.count(n) > 1), layers[-1])
        raise UnsupportedModelError(
            f"its {num_layers} layers call attention {len(layers)} times (layer {twice} more than "
            "once, or beyond the last): they do not keep one key and value for each token"
        )
    return sorted(probe.calls, key=lambda call: call.layer)


def _check_arguments(call: AttentionCall) -> None:
    if call.has_position_bias:
        raise UnsupportedModelError(
            f"layer {call.layer} adds position biases to the scores, which paged attention does not"
        )
    if call.window is not None and call.window < 1:
        raise UnsupportedModelError(f"layer {call.layer} has a window of {call.window} tokens")
    if call.unknown:
        raise UnsupportedModelError(
            f"layer {call.layer} gives attention {', '.join(call.unknown)}, which paged attention "
            "does not know"
        )


def _check_mask(config: UniversalConfig, probe: Probe, call: AttentionCall) -> None:
    """The mask that the layer would have under its own attention is causal within its window."""
    mask = probe.mask_of(call)
    if mask is None:
        if call.mask is not None:
            raise UnsupportedModelError(
                f"layer {call.layer} has a mask of its own making, which paging cannot see"
            )
        if not call.is_causal:
            raise UnsupportedModelError(f"layer {call.layer} attends to later tokens as well")
        if call.window is not None:
            raise UnsupportedModelError(
                f"layer {call.layer} names a window of {call.window} tokens and has no mask for it"
            )
        return
    queries, keys = _pairs_to_compare(call.window, config.max_position_embeddings, mask.made.device)
    seen = _seen(mask, queries, keys)
    if (seen & (keys > queries)).any():
        raise UnsupportedModelError(
            f"layer {call.layer} attends to later tokens as well: it is an encoder, or a decoder "
            "whose is_decoder is false"
        )
    expected = keys <= queries
    if call.window is not None:
        expected &= keys > queries - call.window
    if not torch.equal(seen, expected):
        raise UnsupportedModelError(_window_mismatch(call, seen & ~expected))


def _window_mismatch(call: AttentionCall, beyond: Tensor) -> str:
    """`beyond` says for which pairs the mask shows what the window would hide, bool [n]."""
    named = "no window" if call.window is None else f"a window of {call.window} tokens"
    if beyond.any():
        return f"layer {call.layer} names {named} to attention and sees more than that in its mask"
    return (
        f"layer {call.layer} names {named} to attention, and its mask hides more: the window (or "
        "chunk) is in the mask alone, which paging does not see"
    )


def _seen(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether each query position sees the key position beside it, bool [n]."""
    zeros = torch.zeros_like(queries)
    with _quoted("in its mask at later positions"):
        return mask.function(zeros, zeros, queries, keys).expand(len(queries))


def _pairs_to_compare(
    window: int | None, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys, int64 [n] each, around every place where a mask may change."""
    powers = [2**n for n in range(max_positions.bit_length())]
    lasts = [window or 1, 2 * (window or 1), 3 * (window or 1) + 1, max_positions - 1, *powers]
    queries = sorted({q for last in lasts for q in (last - 1, last, last + 1)} | set(range(64)))
    queries = [q for q in queries if 0 <= q < max(max_positions, (window or 0) + 2)]
    pairs = {
        (q, k)
        for q in queries
        for w in (window or q, *powers)
        for k in (q - w - 1, q - w, q - w + 1, q - 1, q, q + 1, q // 2, 0)
        if k >= 0
    }
    ordered = torch.tensor(sorted(pairs), device=device)
    return ordered[:, 0], ordered[:, 1]


def _layout(calls: list[AttentionCall], context: int) -> AttentionLayout:
    """What the cache is made of. A window as long as the context is none."""
    shapes = {(call.num_kv_heads, max(call.key_dim, call.value_dim)) for call in calls}
    if len(shapes) > 1:
        listed = ", ".join(f"{heads} of {size}" for heads, size in sorted(shapes))
        raise UnsupportedModelError(
            f"its layers have key-value heads of different number or size ({listed}), and all "
            "layers share one cache"
        )
    ((num_kv_heads, head_dim),) = shapes
    for call in calls:
        if call.num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"layer {call.layer} has {call.num_heads} query heads for {num_kv_heads} key-value "
                "heads"
            )
    return AttentionLayout(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=tuple(
            call.window if call.window is not None and call.window < context else None
            for call in calls
        ),
        group_size=max(call.num_heads for call in calls) // num_kv_heads,
    )


# -- trying --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A sequence, another one for beside it, and the model that computes them."""

    network: Network
    paged: PagedTrial
    ids: list[int]
    others: list[int]
    far: int  # the last position at which `others` fit the context

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.network.dtype]

    @property
    def same_shape_tolerance(self) -> float:
        return _SAME_SHAPE_TOLERANCES[self.network.dtype]

    def run(self, *chunks: Chunk) -> list[Tensor]:
        """Logits of each chunk from one batch. What a forward pass raises is a reason."""
        with _quoted("over paged attention"):
            return self.paged.step(*chunks)


def _try_out(model: UniversalModel, network: Network, kernels: Kernels) -> None:
    """Each way to compute a short sequence gives the logits that it has alone."""
    config = model.config
    windows = [w for w in model.kv_spec(1, 1).windows if w is not None and w <= _MAX_SHORT_WINDOW]
    context = config.max_position_embeddings
    length = min(max([_SHORT_LEN, *(window + 5 for window in windows)]), context)
    other_len = min(_OTHER_LEN, context)
    trial = _Trial(
        network=network,
        paged=PagedTrial(model, kernels, 5 * length + 3 * other_len),
        ids=made_up_tokens(length, config.vocab_size, seed=1),
        others=made_up_tokens(other_len, config.vocab_size, seed=2),
        far=context - other_len,
    )
    (alone,) = trial.run(_new(trial.ids))
    _check_shape(alone, config)
    _try_beside_another(trial, alone)
    _try_in_pieces(trial, alone)
    _try_positions(trial)
    with _quoted("with transformers' own attention"):
        eager = eager_logits(network, trial.ids)
    reason = "its logits over paged attention are not those over transformers' own attention"
    check_close(alone, eager, trial.tolerance, reason)


def _try_beside_another(trial: _Trial, alone: Tensor) -> None:
    """Neither the place in the batch, nor what else is in it, nor later tokens change logits."""
    first, _ = trial.run(_new(trial.ids), _new(trial.others))
    _, second = trial.run(_new(trial.others), _new(trial.ids))
    reason = (
        "a sequence's logits change with its place in the batch: it takes rows of the batch for "
        "positions, or mixes tokens outside attention"
    )
    check_close(second, first, trial.same_shape_tolerance, reason)
    check_close(second, alone, trial.tolerance, reason)
    other_last = 0 if trial.ids[-1] else 1
    changed = [*trial.ids[:-1], other_last]
    _, third = trial.run(_new(trial.others[::-1], trial.far), _new(changed))
    reason = "a token's logits change with a later token, or with the batch's largest position"
    check_close(third[:-1], second[:-1], trial.same_shape_tolerance, reason)


def _try_in_pieces(trial: _Trial, alone: Tensor) -> None:
    """Two chunks and a last token have the logits of the whole."""
    ids, half = trial.ids, len(trial.ids) // 2
    sequence = MadeUpSequence()
    parts = [
        trial.run(Chunk(sequence=sequence, token_ids=piece))[0]
        for piece in (ids[:half], ids[half:-1], ids[-1:])
        if piece
    ]
    reason = (
        "a sequence computed in pieces has other logits than at once: it keeps more than keys and "
        "values from token to token"
    )
    check_close(torch.cat(parts), alone, trial.tolerance, reason)


def _try_positions(trial: _Trial) -> None:
    """The model counts positions from 0, as it is told them."""
    network, ids = trial.network, trial.ids
    positions = torch.arange(len(ids), device=network.device)
    with _quoted("with transformers' own attention"):
        counted, told = eager_logits(network, ids), eager_logits(network, ids, positions)
    reason = "it counts positions in a way of its own and not from 0"
    check_close(told, counted, _REPEAT_TOLERANCES[network.dtype], reason)


def _new(token_ids: list[int], first_position: int | None = None) -> Chunk:
    return Chunk(sequence=MadeUpSequence(), token_ids=token_ids, first_position=first_position)


def _check_shape(logits: Tensor, config: UniversalConfig) -> None:
    if logits.shape[-1] != config.vocab_size:
        raise UnsupportedModelError(
            f"it gives {logits.shape[-1]} logits, and its configuration says {config.vocab_size}"
        )
    if not logits.isfinite().all():
        raise UnsupportedModelError("its logits are not finite")


def eager_logits(network: Network, token_ids: list[int], positions: Tensor | None = None) -> Tensor:
    """Logits of one sequence alone with transformers' own attention, float32 [T, vocab_size].

    The model counts its positions itself unless they are given, int64 [T].
    """
    ids = torch.tensor(token_ids, device=network.device)
    rows = torch.arange(len(token_ids), device=network.device)
    with torch.inference_mode(), using_attention(network.module, EAGER):
        return network.logits(ids, positions, rows)


def check_close(actual: Tensor, expected: Tensor, tolerance: float, reason: str) -> None:
    """Raise UnsupportedModelError with `reason` where logits differ by more than `tolerance`."""
    error = (actual - expected).square().mean().sqrt() / expected.std().clamp_min(1e-30)
    if not error <= tolerance:  # also NaN
        raise UnsupportedModelError(
            f"{reason} (they differ by {error:.2g} of their standard deviation)"
        )
