"""One call of the attention function: what it asks for, why it has to be dense, and how it is then computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hf_memeff.integrations.anchor.masks import is_traced, made_here
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.dispatch import anchor_attention, every_key_kept
from hf_memeff.ops.anchor.layout import boundaries, layout_mask, layout_segments, plain_segments, restarts
from hf_memeff.ops.anchor.masked import masked_attention
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import Segment, has_candidates
from hf_memeff.ops.precision import autocast_dtype

NEVER_SPARSE = frozenset({"decode", "not causal", "training", "gradient", "sliding window", "short", "every key kept"})
"""Reasons that are how it should be; the others are what ``strict`` turns into an error."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call.

    Attributes:
        module: the attention module.
        query: (B, H, Nq, D).
        key: (B, Hkv, Nk, D), without the unfilled end of a static cache.
        value: (B, Hkv, Nk, Dv).
        causal: whether rows see only what is before them.
        mask: (B, 1 or H, Nq, Nk) of transformers or the user, or ``None``.
        layout: (B, Nk) where rows have padding or several sequences, or ``None``.
        segments: the sequences of a causal call without ``mask``; ``None`` with a gap in one, or while tracing.
        scale: factor of the dot products.
        dropout: probability of dropping a weight.
        softcap: bound of the scores, or ``None``.
        window: how many keys up to its own position a row sees, or ``None``.
        sinks: (H,), logits in the denominator, or ``None``.
        position_bias: added to the scores, or ``None``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    mask: Tensor | None
    layout: Tensor | None
    segments: Sequence[Segment] | None
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    position_bias: Tensor | None = None

    @property
    def wants_grad(self) -> bool:
        """Whether autograd follows this call."""
        inputs = (self.query, self.key, self.value, self.sinks, self.position_bias)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool | None,
    scale: float,
    dropout: float,
    *,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **ignored: Any,
) -> AttentionCall:
    """Make sense of the arguments of `anchor_attention_forward`; ``causal`` is ``None`` where nobody says.

    Raises:
        ValueError: a mask, sequence lengths or sinks that don't belong to these rows and heads.
    """
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise ValueError(
            f"got s_aux {tuple(s_aux.shape)}, expected one sink per query head, ({query.shape[1]},). "
            'Fix: load this model with attn_implementation="eager".'
        )
    # what autocast would make of them in any attention function; it may leave them with two dtypes
    dtype = autocast_dtype(query.device.type)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    layout = None
    if mask is not None and mask.ndim == 2:
        if mask.is_floating_point() or not query.shape[2] <= mask.shape[1] <= key.shape[2]:
            raise ValueError(
                f"got a {mask.dtype} mask {tuple(mask.shape)} for {query.shape[2]} queries and {key.shape[2]} keys, "
                "expected one of integers or bools that ends with the last query. "
                "Fix: pass the mask of all tokens so far to the model, 1 for real tokens."
            )
        # only a causal mask is ever made two-dimensional
        causal = True if causal is None else causal
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
        mask, layout = (None, mask) if causal else (mask.bool()[:, None, None, :], None)
    causal = bool(causal) and query.shape[2] <= key.shape[2]
    segments = None
    if causal and not is_traced(query.device):
        if layout is None:
            packed = _packed(query, key, position_ids, cu_seq_lens_q)
            if mask is None:
                layout = packed
            elif packed is not None and made_here(mask):
                whole = mask
                mask = _remembered(whole, "packed", lambda: whole & layout_mask(packed, query.shape[2]))
        if mask is None:
            segments = _segments(layout, query, key)
    return AttentionCall(
        module,
        query,
        key,
        value,
        causal,
        mask,
        layout,
        segments,
        scale,
        dropout,
        softcap,
        sliding_window,
        s_aux,
        position_bias,
    )


def _packed(query: Tensor, key: Tensor, position_ids: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Layout of packed sequences, which with transformers' default cache arrive without a mask; ``None`` for none."""
    batch, rows = query.shape[0], query.shape[2]
    if lengths is not None and rows > 1:
        if batch != 1 or key.shape[2] != rows or int(lengths[-1]) != rows:
            raise ValueError(
                f"got cu_seq_lens_q ending with {int(lengths[-1])} for {batch} x {rows} queries and {key.shape[2]} "
                "keys, expected one row of packed sequences without cache. "
                'Fix: attn_implementation="sdpa" for continuous batching.'
            )
        return boundaries(lengths)
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != rows or key.shape[2] != rows:
        return None
    return _remembered(position_ids, ("packed", batch), lambda: restarts(position_ids.expand(batch, -1)))


def _segments(layout: Tensor | None, query: Tensor, key: Tensor) -> Sequence[Segment] | None:
    rows = query.shape[2]
    if layout is None:
        return plain_segments(query.shape[0], rows, key.shape[2])
    return _remembered(layout, ("segments", rows), lambda: layout_segments(layout.int(), rows))


_memory: dict[int, tuple[Callable[[], Tensor | None], int, dict[Any, Any]]] = {}
"""What was made from a mask or from positions, which all layers of a forward pass bring, as long as these live."""


def _remembered(source: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    if is_traced(source.device) or source.is_inference():  # which has no version to tell a changed tensor by
        return make()
    name = id(source)
    entry = _memory.get(name)
    if entry is None or entry[0]() is not source or entry[1] != source._version:
        entry = _memory[name] = (weakref.ref(source, lambda ref: _forget(name, ref)), source._version, {})
    if key not in entry[2]:
        entry[2][key] = make()
    return entry[2][key]


def _forget(name: int, ref: Callable[[], Tensor | None]) -> None:
    entry = _memory.get(name)
    if entry is not None and entry[0] is ref:  # a new tensor may have the old one's id by now
        del _memory[name]


def dense_reason(call: AttentionCall, config: AnchorAttentionConfig, layer: int) -> str | None:
    """Why a call is not sparse, or ``None`` where it is.

    Raises:
        ValueError: thresholds that don't fit the layer; ``strict``, and a reason that keeps a long causal prompt from
            being sparse.
    """
    reason = _reason(call, config, layer)
    if config.strict and reason is not None and reason not in NEVER_SPARSE:
        raise ValueError(
            f"{type(call.module).__name__} has to attend densely ({reason}), and AnchorAttentionConfig(strict=True) "
            "makes that an error. Fix: change the call, or leave strict out."
        )
    return reason


def _reason(call: AttentionCall, config: AnchorAttentionConfig, layer: int) -> str | None:
    if not call.causal:
        return "not causal"
    if call.query.shape[2] == 1:
        return "decode"
    # whatever the grad mode: a checkpoint runs its forward without grad and again with it, and both must agree
    if call.module.training:
        return "training"
    if call.wants_grad:
        return "gradient"
    if call.window is not None:
        return "sliding window"
    if call.key.shape[2] < config.min_length:
        return "short"
    if call.mask is not None:
        return "mask"
    if call.segments is None:
        return "gap in padding"
    for name in ("softcap", "position_bias"):
        if getattr(call, name) is not None:
            return name.replace("_", " ")
    if call.dropout > 0:
        return "dropout"
    if not has_candidates(call.segments, config):
        return "short"
    thetas = config.head_thresholds(layer, call.query.shape[1])
    return "every key kept" if every_key_kept(thetas, config, call.query) else None


def attend_densely(call: AttentionCall) -> Tensor:
    """Dense attention of a call, equal to the model's eager attention on rows that are not padding, (B, Nq, H, Dv)."""
    heads, groups = call.query.shape[1], call.key.shape[1]
    own = call.softcap is not None or call.sinks is not None
    # transformers' function repeats keys by what the module says, which may not be what the tensors are
    own = own or heads != groups * getattr(call.module, "num_key_value_groups", 1)
    square = call.query.shape[2] in (1, call.key.shape[2])
    window = call.window is not None and call.window < call.key.shape[2] and call.mask is None and call.causal
    plain = call.layout is None and (square or not call.causal) and not window
    if not own and (call.mask is not None or plain or (is_traced(call.query.device) and call.layout is None)):
        return _by_transformers(call, call.mask)
    if call.segments is not None and not window and call.softcap is None and call.position_bias is None:
        simple = call.sinks is None and all(segment.offset == 0 for segment in call.segments)
        # elsewhere than on a CPU, a mask costs less than what sequences with earlier keys are attended with
        if simple or (call.query.is_cpu and not call.wants_grad and call.dropout == 0):
            return _one_by_one(call, simple).transpose(1, 2).contiguous()
    mask = call.mask
    if mask is None and call.causal:
        mask = _causal_mask(call, call.window if window else None)
    if not own:
        return _by_transformers(call, mask)
    if call.position_bias is not None:
        raise ValueError(
            f"{type(call.module).__name__} asks for position_bias with softcap or sinks, which "
            'attn_implementation="anchor" has no dense form of. Fix: load this model with attn_implementation="eager".'
        )
    with _whole_sums(call.query.device.type):
        out = masked_attention(
            call.query,
            call.key,
            call.value,
            mask,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            dropout=call.dropout,
        )
    return out.transpose(1, 2).contiguous()


def _by_transformers(call: AttentionCall, mask: Tensor | None) -> Tensor:
    return AttentionInterface()["sdpa"](
        call.module,
        call.query,
        call.key,
        call.value,
        mask,
        dropout=call.dropout,
        scaling=call.scale,
        is_causal=call.causal,
        position_bias=call.position_bias,
    )[0]


def _one_by_one(call: AttentionCall, simple: bool) -> Tensor:
    """Each sequence by itself, without mask and without its padding, (B, H, Nq, Dv)."""
    segments = call.segments or ()
    if not simple:
        every = AnchorAttentionConfig(min_length=2**31 - 1)
        return attend_sparsely(call, [0.0] * call.query.shape[1], every).out
    out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
    for segment in segments:
        row = slice(segment.batch, segment.batch + 1)
        out[row, :, segment.query_rows] = F.scaled_dot_product_attention(
            call.query[row, :, segment.query_rows],
            call.key[row, :, segment.key_rows],
            call.value[row, :, segment.key_rows],
            dropout_p=call.dropout,
            is_causal=True,
            scale=call.scale,
            enable_gqa=call.query.shape[1] != call.key.shape[1],
        )
    return out


def attend_sparsely(call: AttentionCall, thetas: Sequence[float], config: AnchorAttentionConfig) -> AnchorResult:
    """AnchorAttention of a call, whose sums autocast does not touch."""
    with _whole_sums(call.query.device.type):
        return anchor_attention(
            call.query,
            call.key,
            call.value,
            segments=call.segments or (),
            thetas=thetas,
            config=config,
            scale=call.scale,
            sinks=call.sinks,
        )


def _whole_sums(device_type: str) -> AbstractContextManager[Any]:
    """Keep autocast out of what adds up scores; a device without values has none."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _causal_mask(call: AttentionCall, window: int | None) -> Tensor:
    rows = call.query.shape[2]
    if call.layout is None:
        layout = torch.ones(1, call.key.shape[2], dtype=torch.int, device=call.key.device)
        return layout_mask(layout, rows, window)
    layout = call.layout
    return _remembered(layout, ("mask", rows, window), lambda: layout_mask(layout.int(), rows, window))
