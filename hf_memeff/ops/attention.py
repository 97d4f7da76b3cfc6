"""Attention with its log-sum-exp, and its backward over kept rows: the one user of PyTorch's private attention ops.

Symbols: q (B, H, S, dh), k (B, Hkv, S, dh), v (B, Hkv, S, dv) with H a multiple of Hkv; s_ij = scale q_i . k_j, capped
and masked; lse_i = log sum_j exp s_ij; p_ij = exp(s_ij - lse_i); o_i = sum_j p_ij v_j. With o and lse of a row at hand,
its part of the backward pass needs neither the other rows nor the keys it is not asked
about: ds_ij = p_ij (do_i . v_j - do_i . o_i) (FlashAttention, arXiv 2205.14135, appendix B.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memeff.ops.precision import accumulation_dtype

_FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Scores alive at a time: a few times a core's cache, and small beside the other tensors of a step. An accelerator wants
# fewer and larger launches.
_TILE_BYTES = 2**23
_ACCELERATOR_TILE_BYTES = 2**27


@dataclass(frozen=True)
class ScoreRule:
    """How scores are made from queries and keys, and which keys a query sees.

    Attributes:
        scale: factor of the dot products.
        softcap: c in c tanh(s / c), or ``None``.
        causal: whether a query sees only keys at or before its own position.
        window: how many keys up to its own position a query sees, or ``None`` for all.
        mask: (B or 1, H or 1, S, S), bool (true is seen) or added to the scores, or ``None``.
        mask_rows: instead of ``mask``, a function that makes the rows of one: (B, R) positions -> bool, (B or 1, H or
            1, R, S).
        real: (B, S) bool, keys that are not padding; ``None`` where ``mask`` says so already or all are.
        segments: (B, S) integers, the packed sequence that each token belongs to; ``None`` likewise.
        sinks: (H,), logits that join each row's softmax without a key, or ``None``.
    """

    scale: float
    softcap: float | None = None
    causal: bool = True
    window: int | None = None
    mask: Tensor | None = None
    mask_rows: Callable[[Tensor], Tensor] | None = None
    real: Tensor | None = None
    segments: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def plainly_causal(self) -> bool:
        """Whether position alone says which keys a query sees."""
        others = (self.mask, self.mask_rows, self.window, self.real, self.segments)
        return self.causal and all(other is None for other in others)

    @property
    def unmasked(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and replace(self, causal=True).plainly_causal

    def bias(self, rows: Tensor, dtype: torch.dtype, keys: Tensor | range) -> Tensor:
        """What is added to the scores of some rows: 0 where a key is seen, -inf or the mask's own value elsewhere.

        Args:
            rows: (B, R) positions of the queries.
            dtype: dtype of the scores.
            keys: (B, K) positions of the keys, or a range of them.

        Returns:
            (B or 1, H or 1, R, K).
        """
        columns = torch.arange(keys.start, keys.stop, device=rows.device)[None] if isinstance(keys, range) else keys
        distance = rows[:, :, None] - columns[:, None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.real is not None:
            seen &= _pick(self.real, columns)[:, None, :]
        if self.segments is not None:
            seen &= _pick(self.segments, rows)[:, :, None] == _pick(self.segments, columns)[:, None, :]
        seen = seen[:, None]
        if self.mask_rows is not None:
            seen = seen & _pick_columns(self.mask_rows(rows), keys)
        elif self.mask is not None:
            own = _pick_columns(_pick_rows(self.mask, rows), keys)
            if own.dtype != torch.bool:
                return own.to(dtype).masked_fill(~seen, float("-inf"))
            seen = seen & own
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _pick(values: Tensor, positions: Tensor) -> Tensor:
    """``values`` (B or 1, S) at ``positions`` (B or 1, R)."""
    batch = max(len(values), len(positions))
    return values.expand(batch, -1).gather(1, positions.expand(batch, -1))


def _pick_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, R) of a mask (B or 1, H or 1, S, S)."""
    if len(rows) == 1:
        return mask[:, :, rows[0]]
    index = rows[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[-1])
    return mask.expand(len(rows), -1, -1, -1).gather(2, index)


def _pick_columns(mask: Tensor, keys: Tensor | range) -> Tensor:
    """Columns (B, K) or a range of them of mask rows (B or 1, H or 1, R, S)."""
    if isinstance(keys, range):
        return mask[..., keys.start : keys.stop]
    if len(keys) == 1:
        return mask[..., keys[0]]
    index = keys[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1)
    return mask.expand(len(keys), -1, -1, -1).gather(3, index)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """The CPU's flash kernel with its log-sum-exp; bit for bit what ``scaled_dot_product_attention`` computes with it.

    Args:
        q: (B, H, R, dh).
        k: (B, Hkv, S, dh).
        v: (B, Hkv, S, dh).
        scale: factor of the dot products.
        causal: queries see keys at or before their own index (R = S).
        mask: bool or added to the scores, (B or 1, H or 1, R, S).

    Returns:
        Output (B, H, R, dh) and log-sum-exp (B, H, R), float32 or float64; ``None`` where the kernel does not apply.
    """
    if not _flash_applies(q, k, v):
        return None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        mask = mask.to(q.dtype)
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _flash_applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype in _FLASH_DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == v.shape[-1]
        and 0 not in (*q.shape, *k.shape)
        and all(t.stride(-1) == 1 for t in (q, k, v))
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def capped_scores(q: Tensor, k: Tensor, rule: ScoreRule) -> Tensor:
    """Scaled and capped scores of q (B, H, R, dh) and k (B, Hkv, K, dh) without mask, (B, H, R, K) in the accumulation
    dtype; keys are not repeated for the heads of a group.
    """
    batch, heads, rows, size = q.shape
    groups = k.shape[1]
    # in the wide dtype before the product: half precision would round scores, and float16 overflow on unscaled ones
    wide = accumulation_dtype(q.dtype)
    folded = q.reshape(batch, groups, heads // groups * rows, size).to(wide)
    s = (folded @ k.to(wide).transpose(-1, -2)).mul_(rule.scale)
    if rule.softcap is not None:
        s = s.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return s.view(batch, heads, rows, k.shape[2])


def row_tiles(q: Tensor, keys: int, most: int | None = None) -> Iterator[slice]:
    """Slices of the rows of ``q`` (B, H, R, dh) whose scores against so many keys fit a tile, at most so many rows."""
    batch, heads, rows, _ = q.shape
    tile_bytes = _TILE_BYTES if q.device.type == "cpu" else _ACCELERATOR_TILE_BYTES
    size = max(1, tile_bytes // (accumulation_dtype(q.dtype).itemsize * max(1, batch * heads * keys)))
    size = size if most is None else min(size, most)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def rows_log_sum_exp(q: Tensor, k: Tensor, rule: ScoreRule, rows: Tensor) -> Tensor:
    """Log-sum-exp of some rows over all keys, in tiles.

    Args:
        q: (B, H, R, dh), the queries at ``rows``.
        k: (B, Hkv, S, dh).
        rule: how scores are made.
        rows: (B, R) positions of the queries.

    Returns:
        (B, H, R), float32 (float64 for float64 inputs); -inf for a row that sees no key.
    """
    parts = []
    for tile in row_tiles(q, k.shape[2]):
        s = capped_scores(q[:, :, tile], k, rule)
        s += rule.bias(rows[:, tile], s.dtype, range(k.shape[2]))
        parts.append(s.logsumexp(-1))
    lse = torch.cat(parts, 2)
    return lse if rule.sinks is None else torch.logaddexp(lse, rule.sinks.to(lse.dtype)[None, :, None])


def rows_attention(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of some rows over all keys with its log-sum-exp, in tiles.

    Args:
        q: (B, H, R, dh), the queries at ``rows``.
        k: (B, Hkv, S, dh).
        v: (B, Hkv, S, dv).
        rule: how scores are made.
        rows: (B, R) positions of the queries.

    Returns:
        Output (B, H, R, dv) in the dtype of ``v`` and log-sum-exp (B, H, R).
    """
    outputs, sums = [], []
    for tile in row_tiles(q, k.shape[2]):
        q_tile = q[:, :, tile].contiguous()
        bias = rule.bias(rows[:, tile], q.dtype, range(k.shape[2]))
        found = None
        if rule.softcap is None and rule.sinks is None:
            found = flash_forward(q_tile, k, v, scale=rule.scale, causal=False, mask=bias)
        if found is None:
            s = capped_scores(q_tile, k, rule)
            s += bias
            lse = s.logsumexp(-1)
            if rule.sinks is not None:
                lse = torch.logaddexp(lse, rule.sinks.to(lse.dtype)[None, :, None])
            found = _grouped(probabilities(s, lse).to(v.dtype), v), lse
        outputs.append(found[0])
        sums.append(found[1])
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse) in place of masked scores ``s`` (B, H, R, K), ``lse`` (B, H, R); 0 in a row that sees no key."""
    return s.sub_(lse.masked_fill(lse == float("-inf"), float("inf"))[..., None]).exp_()


def _grouped(weights: Tensor, values: Tensor) -> Tensor:
    """``weights`` (B, H, R, K) times ``values`` (B, Hkv, K, d), to (B, H, R, d)."""
    batch, heads, rows, keys = weights.shape
    groups = values.shape[1]
    folded = weights.reshape(batch, groups, heads // groups * rows, keys)
    return (folded @ values).view(batch, heads, rows, values.shape[-1])


def _grouped_transposed(weights: Tensor, values: Tensor, groups: int) -> Tensor:
    """``weights`` (B, H, R, K) transposed times ``values`` (B, H, R, d), summed over the heads of a group: (B, groups,
    K, d).
    """
    batch, heads, rows, keys = weights.shape
    folded = weights.reshape(batch, groups, heads // groups * rows, keys)
    return folded.transpose(-1, -2) @ values.reshape(batch, groups, heads // groups * rows, values.shape[-1])


class KeptAttention(torch.autograd.Function):
    """Attention whose output is known, differentiated for its kept rows.

    Inputs: q (B, H, T, dh), k (B, Hkv, T, dh), v (B, Hkv, T, dv) of the kept rows; o (B, H, T, dv) and lse (B, H, T),
    the output and log-sum-exp of these rows over all keys; the rule; the rows' positions (B, T); optionally keys (B,
    Hkv, S, dh) and values (B, Hkv, S, dv) of all tokens. Output: o itself.

    Without them the backward pass sees the pairs of kept rows alone, logits towards other keys being constants. With
    them dq is complete, and the keys and values of other tokens are constants. Saved: references to the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        rule: ScoreRule,
        rows: Tensor,
        all_keys: Tensor | None = None,
        all_values: Tensor | None = None,
    ) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(q, k, v, o, lse, rows, all_keys, all_values)
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, rows, all_keys, all_values = ctx.saved_tensors
        if all_keys is None:
            dq, dk, dv = _backward_over(do, q, k, v, o, lse, ctx.rule, rows, rows)
        else:
            dq, dk, dv = _backward_over(do, q, all_keys, all_values, o, lse, ctx.rule, rows, None)
            index = rows[:, None, :, None]
            dk = dk.gather(2, index.expand(-1, dk.shape[1], -1, dk.shape[-1]))
            dv = dv.gather(2, index.expand(-1, dv.shape[1], -1, dv.shape[-1]))
        return dq, dk, dv, None, None, None, None, None, None


def _backward_over(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rule: ScoreRule,
    rows: Tensor,
    keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of queries at ``rows`` over keys at ``keys`` (``None``: all), from the rows' complete o and lse."""
    # rows are sorted, so that among themselves position order is index order and the kernel needs no mask
    plain = rule.unmasked or (keys is not None and rule.plainly_causal)
    if rule.softcap is None and _flash_applies(q, k, v) and plain:
        return _flash_backward(do, q, k, v, o, lse, rule, rule.causal, None)
    dq = torch.empty_like(q)
    wide = accumulation_dtype(q.dtype)
    dk = torch.zeros(k.shape, dtype=wide, device=k.device)
    dv = torch.zeros(v.shape, dtype=wide, device=v.device)
    for tile in row_tiles(q, k.shape[2]):
        bias = rule.bias(rows[:, tile], wide, range(k.shape[2]) if keys is None else keys)
        part = do[:, :, tile], q[:, :, tile], o[:, :, tile], lse[:, :, tile]
        if rule.softcap is None and _flash_applies(q, k, v):
            do_, q_, o_, lse_ = part
            found = _flash_backward(do_, q_, k, v, o_, lse_, rule, False, bias)
        else:
            found = _tile_backward(*part, k, v, rule, bias)
        dq[:, :, tile] = found[0]
        dk += found[1]
        dv += found[2]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rule: ScoreRule,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The CPU kernel's backward; a row that sees no key has lse = -inf there, which its own softmax cannot make."""
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    groups, heads = k.shape[1], q.shape[1]
    if groups != heads:
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    bias = bias.to(q.dtype) if bias is not None else None
    dq, dk, dv = op(do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=rule.scale)
    if groups != heads:
        dk, dv = (t.unflatten(1, (groups, heads // groups)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def _tile_backward(
    do: Tensor, q: Tensor, o: Tensor, lse: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    capped = capped_scores(q, k, rule)
    p = probabilities(capped + bias, lse)
    through = (do * o).sum(-1, dtype=p.dtype, keepdim=True)
    ds = capped_scores(do, v, replace(rule, scale=1.0, softcap=None)).sub_(through).mul_(p).mul_(rule.scale)
    if rule.softcap is not None:
        ds = ds.mul_(1.0 - (capped / rule.softcap).square_())
    dv = _grouped_transposed(p.to(do.dtype), do, groups)
    ds = ds.to(q.dtype)
    return _grouped(ds, k), _grouped_transposed(ds, q, groups), dv
