"""AnchorAttention with whole score matrices (arXiv 2505.23520, section 3, in the tiling of tiling.py): the oracle.

It follows the text row by row and shares no code with the backends but the settings: they are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.result import AnchorResult, KeptKeys
from hf_memeff.ops.anchor.tiling import Segment
from hf_memeff.ops.precision import accumulation_dtype

DENSE_SHARE = math.inf
"""It has no cost to weigh: a superblock is dense where the settings name a share, else never."""


def anchor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Sequence[Segment],
    thetas: Sequence[float],
    config: AnchorAttentionConfig,
    scale: float,
    sinks: Tensor | None = None,
    return_kept: bool = False,
) -> AnchorResult:
    """As `dispatch.anchor_attention`, with H * Nq * Nk scores in memory."""
    wide = accumulation_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide, device=q.device)
    result = AnchorResult(out, torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device))
    for number, segment in enumerate(segments):
        for head, theta in enumerate(thetas):
            queries = q[segment.batch, head, segment.query_rows].to(wide)
            keys = k[segment.batch, head // group, segment.key_rows].to(wide)
            values = v[segment.batch, head // group, segment.key_rows].to(wide)
            seen = _seen(queries, keys, theta, config, scale, number, head, result)
            scores = (queries @ keys.T * scale).masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(wide).expand(len(scores), 1)], 1)
            result.out[segment.batch, head, segment.query_rows] = scores.softmax(-1)[:, : len(keys)] @ values
            result.lse[segment.batch, head, segment.query_rows] = scores.logsumexp(-1)
    result.out = result.out.to(v.dtype)
    if not return_kept:
        result.kept_keys.clear()
    return result


def _seen(
    q: Tensor,
    k: Tensor,
    theta: float,
    config: AnchorAttentionConfig,
    scale: float,
    segment: int,
    head: int,
    result: AnchorResult,
) -> Tensor:
    """Which keys (n) each query (m) of one head and sequence sees, (m, n) bool; counts into ``result``."""
    m, n = len(q), len(k)
    offset = n - m
    position = torch.arange(n, device=q.device)
    causal = position <= position[offset:, None]
    if n < config.min_length or m < config.block_size:
        return causal
    seen = causal.clone()
    init = config.init_blocks * config.block_size
    superblock = config.step * config.block_size
    sparse_rows = min(m, n - config.dense_tail - offset)  # the dense tail neither is sparse nor helps to choose
    for b in range(offset // superblock, (n - 1) // superblock + 1):
        rows = [t - offset for t in range(b * superblock, (b + 1) * superblock) if 0 <= t - offset < sparse_rows]
        last = max(init, b * superblock - config.block_size)
        if not rows or last <= init:
            continue
        candidate = (position >= init) & (position < last)
        anchor = causal[rows] & ~candidate
        logits = (q[rows] @ k.T * scale).masked_fill(~anchor, -torch.inf)
        maximum = logits.amax(-1)
        margin = torch.full((n,), -torch.inf, dtype=q.dtype, device=q.device)
        blocks = [(offset + row) // config.block_size for row in rows]
        for block in sorted(set(blocks)):
            mine = [i for i, other in enumerate(blocks) if other == block]
            pooled = q[rows][mine].mean(0) @ k.T * scale - maximum[mine].mean()
            margin = torch.maximum(margin, pooled)
        kept = candidate & (margin >= -theta)
        if config.max_keep is not None and int(kept.sum()) > config.max_keep:
            best = margin.masked_fill(~kept, -torch.inf).topk(config.max_keep).indices
            kept = torch.zeros_like(kept).index_fill_(0, best, True)
        result.candidates += last - init
        if int(kept.sum()) > config.dense_share(DENSE_SHARE) * (last - init):
            result.dense_tiles += 1
            kept = candidate
        else:
            result.sparse_tiles += 1
        result.kept += int(kept.sum())
        seen[rows] = anchor | (causal[rows] & kept)
        result.kept_keys.append(KeptKeys(segment, head, offset + rows[0], kept.nonzero()[:, 0]))
    return seen
