"""How much attention mass a threshold keeps, and the least threshold per head that keeps enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.sweep import LOG2_E
from hf_memeff.ops.anchor.tiling import Segment, Tile, segment_tiles
from hf_memeff.ops.anchor.torch_backend import TileAttention, anchor_attention
from hf_memeff.ops.precision import accumulation_dtype

CHEAP_SHARE = 0.02
"""Share of the candidates that every head keeps, up to the paper's theta: it costs less than the pooled scores do, and
what a text does not need another may, such as the one key of a fact far back."""

MOST_CHEAP_THETA = 12.0

_SAMPLED_ROWS = 256  # of a tile: what is averaged over 2048 rows is known well enough from these

_CUTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the candidates that are tried, first those that need the least theta."""


@dataclass(frozen=True)
class Thresholds:
    """Calibrated thresholds of one layer.

    Attributes:
        theta: (H,).
        scores: scores of queries and keys that are computed with them on the text they are from.
    """

    theta: Tensor
    scores: float


def least_thresholds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[Segment],
    config: AnchorAttentionConfig,
    scale: float,
    target_recall: float,
) -> Thresholds | None:
    """The least theta per query head that keeps a share of the attention mass, mean over the rows of a tile, and
    changes the head's output by no more than the rest of it.

    Mass alone would not do. Much of it goes to first keys for which a softmax has no other use, behind which a head
    could lose all that it does. What is asked for holds in every tile rather than in their mean, because recall falls
    with the distance from the start.

    Args:
        q, k, v, segments, config, scale: as `dispatch.anchor_attention`.
        target_recall: share of each row's attention mass, in (0, 1]; 1 - target_recall is the relative error of the
            output, in the 2-norm over the rows of a tile.

    Returns:
        Thresholds, or ``None`` where no row has a candidate.
    """
    needed, cheap, others, scores = [], [], [], 0.0
    for segment in segments:
        keys = segment.batch, slice(None), segment.key_rows
        queries = q[segment.batch, :, segment.query_rows].unflatten(0, (k.shape[1], -1))
        for tile in segment_tiles(segment, config):
            rows = tile.stop - tile.start
            scores += q.shape[1] * rows * (tile.start - tile.candidates + rows / 2)
            if tile.candidates:
                place = slice(tile.start - segment.offset, tile.stop - segment.offset)
                found = _tile_thresholds(tile, queries[:, :, place], k[keys], v[keys], config, scale, target_recall)
                needed.append(found[0])
                cheap.append(found[1][:, int(CHEAP_SHARE * tile.candidates)])
                others.append((rows, found[1]))
    if not needed:
        return None
    theta = torch.maximum(torch.stack(needed).amax(0), torch.stack(cheap).amin(0).clamp_(max=MOST_CHEAP_THETA))
    scores += sum(rows * float((each <= theta[:, None]).sum()) for rows, each in others)
    return Thresholds(theta, scores)


def _tile_thresholds(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, config: AnchorAttentionConfig, scale: float, target_recall: float
) -> tuple[Tensor, Tensor]:
    """Theta that a tile needs, (H,), and theta that each candidate needs, (H, candidates) ascending.

    Args:
        q: (Hkv, G, R, D), the tile's rows.
        k, v: (Hkv, n, ...), the sequence's keys and values.
    """
    wide = accumulation_dtype(q.dtype)
    out, lse = v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=wide)
    work = TileAttention(tile, q, out, lse, k, v, scale)
    top = work.init_and_local()
    order = work.margins(top, config.block_size).div_(-LOG2_E).sort(1)
    rows = torch.arange(0, q.shape[2], max(1, q.shape[2] // _SAMPLED_ROWS), device=q.device)
    local, local_lse = out[:, :, rows].to(wide).flatten(0, 1), lse[:, :, rows].flatten(0, 1)
    work.attend_all()
    dense, dense_lse = out[:, :, rows].to(wide).flatten(0, 1), lse[:, :, rows].flatten(0, 1)
    queries = q[:, :, rows].to(wide).flatten(0, 1) * scale
    needed = []
    for head, index in enumerate(order.indices + tile.first_candidate):
        keys, values = k[head // q.shape[1]][index].to(wide), v[head // q.shape[1]][index].to(wide)
        weights = (queries[head] @ keys.T).sub_(dense_lse[head][:, None]).exp_()
        mass = (local_lse[head] - dense_lse[head]).exp_()[:, None]
        count = _least_count(mass, mass * local[head], weights, values, dense[head], target_recall)
        needed.append(order.values[head, count - 1] if count else order.values.new_tensor(-torch.inf))
    return torch.stack(needed), order.values


def _least_count(
    mass: Tensor, mixed: Tensor, weights: Tensor, values: Tensor, dense: Tensor, target_recall: float
) -> int:
    """How many candidates it takes, in their order, to come close enough to dense attention.

    Args:
        mass: (R, 1), share of the attention mass that is kept without candidates.
        mixed: (R, Dv), that share's part of the output.
        weights: (R, C), share of each candidate.
        values: (C, Dv).
        dense: (R, Dv), the whole output.
        target_recall: as `least_thresholds`.
    """
    total = values.shape[0]
    done = 0
    for stop in [0, *sorted({max(1, round(share * total)) for share in _CUTS})]:
        mass = mass + weights[:, done:stop].sum(1, keepdim=True)
        mixed = mixed + weights[:, done:stop] @ values[done:stop]
        done = stop
        error = (mixed / mass - dense).norm() / dense.norm()
        if mass.mean() >= target_recall and error <= 1 - target_recall:
            return stop
    return total  # a target of 1 is missed by rounding even with every key


def row_recall(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[Segment],
    thetas: Sequence[float],
    config: AnchorAttentionConfig,
    scale: float,
) -> Tensor:
    """Share of each row's attention mass that is kept, (B, H, Nq); NaN in rows of padding. Arguments as
    `dispatch.anchor_attention`.
    """
    sparse = anchor_attention(q, k, v, segments=segments, thetas=thetas, config=config, scale=scale)
    every = replace(config, min_length=max(s.keys for s in segments) + 1)
    dense = anchor_attention(q, k, v, segments=segments, thetas=thetas, config=every, scale=scale)
    return (sparse.lse - dense.lse).exp_().clamp_(max=1.0)
