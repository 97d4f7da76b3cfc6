"""Random queries, keys and values, and the two ways to run them, that the tests of ``ops/anchor`` share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memeff.ops.anchor import reference, torch_backend, triton_backend
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import Segment

BLOCK, STEP = 8, 4
SUPERBLOCK = BLOCK * STEP


def settings(**changes: Any) -> AnchorAttentionConfig:
    """Small superblocks (32 rows), sparse at any length and never dense, unless changed."""
    small = {"theta": 2.0, "block_size": BLOCK, "step": STEP, "min_length": 1, "dense_above": None}
    return AnchorAttentionConfig(**{**small, **changes})


def inputs(
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    queries: int = 100,
    offset: int = 0,
    size: int = 16,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, Nq, D), k and v with offset + queries keys; in the memory layout of a model, rows before heads."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, of: int, features: int) -> Tensor:
        return torch.randn(batch, rows, of, features, generator=generator).to(dtype).transpose(1, 2)

    keys = offset + queries
    return random(queries, heads, size) * 1.5, random(keys, groups, size), random(keys, groups, width or size)


def whole(q: Tensor, k: Tensor) -> list[Segment]:
    """One sequence per row of the batch."""
    return [Segment(row, 0, q.shape[2], 0, k.shape[2]) for row in range(len(q))]


def run(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AnchorAttentionConfig,
    segments: list[Segment] | None = None,
    thetas: list[float] | None = None,
    sinks: Tensor | None = None,
) -> AnchorResult:
    """One backend with kept sets returned."""
    module = {"torch": torch_backend, "reference": reference, "triton": triton_backend}[backend]
    return module.anchor_attention(
        q,
        k,
        v,
        segments=whole(q, k) if segments is None else segments,
        thetas=[float(config.theta)] * q.shape[1] if thetas is None else thetas,
        config=config,
        scale=q.shape[-1] ** -0.5,
        sinks=sinks,
        return_kept=True,
    )


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention, causal with the last query at the last key."""
    queries, keys = q.shape[2], k.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def kept_sets(result: AnchorResult) -> dict[tuple[int, int, int], list[int]]:
    """Kept positions by segment, head and tile."""
    return {(kept.segment, kept.head, kept.start): kept.positions.tolist() for kept in result.kept_keys}


def counts(result: AnchorResult) -> tuple[int, int, int, int]:
    """What a result says it cost."""
    return result.candidates, result.kept, result.sparse_tiles, result.dense_tiles


INF = math.inf
