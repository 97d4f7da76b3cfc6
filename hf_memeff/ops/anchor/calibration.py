"""How much attention mass a threshold keeps, and the least threshold per head that keeps enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.sweep import LOG2_E
from hf_memeff.ops.anchor.tiling import Segment, Tile, segment_tiles
from hf_memeff.ops.anchor.torch_backend import TileAttention, anchor_attention
from hf_memeff.ops.precision import accumulation_dtype

CHEAP_SHARE = 0.02
"""Share of the candidates that every head keeps, up to the paper's theta: it costs less than the pooled scores do,
and what
a text does not need another may, such as the one key of a fact far back."""

MOST_CHEAP_THETA = 12.0

_SAMPLED_ROWS = 4  # every so many rows are asked for their weights; what is averaged over 2048 rows changes little


def least_thresholds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[Segment],
    config: AnchorAttentionConfig,
    scale: float,
    target_recall: float,
) -> Tensor | None:
    """The least theta per query head that keeps a share of the attention mass in every tile, mean over its rows.

    It is the mass outside the init keys that counts: these are kept anyway, and much of what they take is mass that a
    softmax has no other use for, behind which a head could lose all that it does. The share of the whole is larger.
    Every tile counts rather than their mean, because recall falls with the distance from the start.

    Args:
        q, k, v, segments, config, scale: as `dispatch.anchor_attention`.
        target_recall: share of each row's attention mass, in (0, 1].

    Returns:
        (H,), or ``None`` where no row has a candidate.
    """
    needed, cheap = [], []
    for segment in segments:
        keys = segment.batch, slice(None), segment.key_rows
        queries = q[segment.batch, :, segment.query_rows].unflatten(0, (k.shape[1], -1))
        for tile in segment_tiles(segment, config):
            if tile.candidates:
                rows = slice(tile.start - segment.offset, tile.stop - segment.offset)
                found = _tile_thresholds(tile, queries[:, :, rows], k[keys], v[keys], config, scale, target_recall)
                needed.append(found[0])
                cheap.append(found[1])
    if not needed:
        return None
    return torch.maximum(torch.stack(needed).amax(0), torch.stack(cheap).amin(0).clamp_(max=MOST_CHEAP_THETA))


def _tile_thresholds(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, config: AnchorAttentionConfig, scale: float, target_recall: float
) -> tuple[Tensor, Tensor]:
    """Theta that a tile needs and theta that is cheap, (H,) each; q (Hkv, G, R, D) its rows, k and v (Hkv, n, ...)."""
    wide, first = accumulation_dtype(q.dtype), tile.first_candidate
    out, lse = v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=wide)
    work = TileAttention(tile, q, out, lse, k, v, scale)
    top = work.init_and_local()
    local_lse = lse.clone()
    order = work.margins(top, config.block_size).div_(-LOG2_E).sort(1)
    work.attend_all()
    init = _masses(q, k[:, :first].to(wide), lse, scale).sum(1, keepdim=True)
    mass = _masses(q, k[:, first : tile.last_candidate].to(wide), lse, scale)
    always = (local_lse - lse).exp_().mean(2).flatten()[:, None]
    lost = 1 - always - mass.gather(1, order.indices).cumsum(1)
    allowed = (1 - target_recall) * (1 - init)
    # keys are taken in the order of what they need, until the rest is small enough; rounding may leave a rest of all
    last = (lost > allowed).sum(1, keepdim=True).clamp_(max=tile.candidates - 1)
    theta = order.values.gather(1, last).masked_fill_(1 - always <= allowed, -torch.inf)
    return theta[:, 0], order.values[:, int(CHEAP_SHARE * tile.candidates)]


def _masses(q: Tensor, candidates: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Share of the attention mass that each candidate has, mean over a sample of the rows, (H, candidates)."""
    sample = torch.arange(0, q.shape[2], _SAMPLED_ROWS, device=q.device)
    mass = lse.new_zeros(q.shape[0] * q.shape[1], candidates.shape[1])
    for rows in sample.split(64):
        scores = q[:, :, rows].to(lse.dtype).flatten(1, 2) @ candidates.transpose(1, 2) * scale
        weights = scores.sub_(lse[:, :, rows].flatten(1, 2)[..., None]).exp_()
        mass += weights.view(len(mass), len(rows), -1).sum(1)
    return mass.div_(len(sample))


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
