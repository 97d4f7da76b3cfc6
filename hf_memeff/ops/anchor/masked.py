"""Attention with everything a model may ask of it: masks, softcap, sinks, dropout. Differentiable, blockwise, dense."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memeff.ops.attention import row_tiles
from hf_memeff.ops.precision import accumulation_dtype


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap(q k^T scale) + mask) v with an optional sink in the denominator.

    Args:
        q: (B, H, Nq, D).
        k: (B, Hkv, Nk, D), H a multiple of Hkv; not repeated.
        v: (B, Hkv, Nk, Dv).
        mask: (B or 1, H or 1, Nq, Nk), bool (true is seen) or added to the scores; ``None`` is none.
        scale: factor of the dot products.
        softcap: c in c tanh(s / c), or ``None``.
        sinks: (H,), logits that join each row's softmax without a key, or ``None``.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, Nq, Dv) in the dtype of ``v``; a row that sees no key is 0.
    """
    batch, heads, _, size = q.shape
    groups = k.shape[1]
    wide = accumulation_dtype(q.dtype)
    outputs = []
    for rows in row_tiles(q, k.shape[2]):
        folded = q[:, :, rows].reshape(batch, groups, -1, size)
        scores = (folded @ k.transpose(-1, -2)).to(wide).view(batch, heads, -1, k.shape[2]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            part = mask[..., rows, :]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        if sinks is not None:
            logits = sinks.to(wide)[None, :, None, None].expand(batch, -1, scores.shape[2], 1)
            scores = torch.cat([scores, logits], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        if mask is not None and mask.dtype == torch.bool:
            weights = weights.masked_fill(~mask[..., rows, :], 0.0)  # else NaN in a row without keys
        weights = F.dropout(weights, dropout).to(v.dtype).view(batch, groups, -1, k.shape[2])
        outputs.append((weights @ v).view(batch, heads, -1, v.shape[-1]))
    return torch.cat(outputs, 2)
