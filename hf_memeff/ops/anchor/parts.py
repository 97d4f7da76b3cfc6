"""Attention over a part of the keys with its log-sum-exp, and how two parts become one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memeff.ops.anchor.sweep import grouped_sweep
from hf_memeff.ops.attention import flash_forward
from hf_memeff.ops.precision import accumulation_dtype


def partial_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax attention over the given keys alone, by the CPU's flash kernel or, where there is none, by sweeps.

    Args:
        q: (Hkv, G, R, D), the G query heads of each key-value head.
        k: (Hkv, K, D), not repeated for the heads of a group.
        v: (Hkv, K, Dv).
        scale: factor of the dot products.
        causal: row i sees keys up to i (R = K); else every row sees every key.

    Returns:
        Output (Hkv, G, R, Dv) in the dtype of ``v`` and log-sum-exp (Hkv, G, R), float32 (float64 for float64).
    """
    size, width = q.shape[-1], v.shape[-1]
    # the kernel wants one head size: zeros change neither dot products nor the columns that are kept
    padded = [F.pad(x, (0, max(size, width) - x.shape[-1])) if size != width and x.is_cpu else x for x in (q, k, v)]
    # key-value heads take the place of the batch, so that the heads of a group share their keys through a stride of 0
    shared = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in padded[1:])
    found = flash_forward(padded[0], *shared, scale=scale, causal=causal)
    if found is not None:
        return found[0][..., :width], found[1]
    wide = accumulation_dtype(q.dtype)
    out, lse = v.new_empty(*q.shape[:3], width), q.new_empty(q.shape[:3], dtype=wide)
    for head, rows, sweep in grouped_sweep(q, k, v, scale=scale, causal=causal, dtype=wide):
        part, part_lse = sweep.finish()
        out[head, :, rows] = part.view(q.shape[1], -1, width)
        lse[head, :, rows] = part_lse.view(q.shape[1], -1)
    return out, lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    With w = sigmoid(lse_2 - lse_1) the output is (1 - w) o_1 + w o_2, and exp(lse) is the sum of both.

    Args:
        out, other: (..., R, Dv) of one dtype.
        lse, other_lse: (..., R), natural.

    Returns:
        Output and log-sum-exp of the union.
    """
    weight = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let a logit without a value join each row's softmax, which leaves exp(lse) / (exp(lse) + exp(sink)) of the
    output.

    Args:
        out: (B, H, R, Dv).
        lse: (B, H, R), natural.
        sinks: (H,).

    Returns:
        Output and log-sum-exp with the sink in the denominator.
    """
    logits = sinks.to(lse.dtype)[None, :, None]
    share = torch.sigmoid(lse - logits)[..., None]
    return (out * share).to(out.dtype), torch.logaddexp(lse, logits)
