"""AnchorAttention from what torch has: the flash kernel for kept keys, matrix products for the anchor.

A tile's rows see the keys [0, a) and [l, t] first, in a sweep that leaves their output, log-sum-exp and maximum, the
anchor. Averaged rows are compared to it, the candidates that pass are gathered as single keys, one kernel call per
query head attends to them, and its result is merged by log-sum-exp. Nothing is computed twice: beyond the attention
itself a tile costs one product of its averaged rows with the candidates, 1 / block_size of what dense attention
computes for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.parts import join_sinks, merge, partial_attention
from hf_memeff.ops.anchor.result import AnchorResult, KeptKeys
from hf_memeff.ops.anchor.sweep import COLUMNS, LOG2_E, grouped_sweep
from hf_memeff.ops.anchor.tiling import Segment, Tile, segment_tiles
from hf_memeff.ops.precision import accumulation_dtype

DENSE_SHARE = 0.95
"""Kept share above which reading all keys in place costs no more than gathering them (measured on a CPU, D = 64)."""


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
    """As `dispatch.anchor_attention`. Temporaries are one tile's: its first output and maxima, the margins of its
    candidates, and one head's gathered keys, values and output.
    """
    wide = accumulation_dtype(q.dtype)
    # rows before heads in memory, as a model's next layer reads them
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=v.dtype, device=v.device).transpose(1, 2)
    result = AnchorResult(out, torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device))
    for number, segment in enumerate(segments):
        batch, every = segment.batch, slice(None)
        k_here, v_here = k[batch, every, segment.key_rows], v[batch, every, segment.key_rows]
        for tile in segment_tiles(segment, config):
            rows = slice(
                segment.query_start + tile.start - segment.offset, segment.query_start + tile.stop - segment.offset
            )
            own, own_out, own_lse = (
                x[batch, every, rows].unflatten(0, (len(k_here), -1)) for x in (q, result.out, result.lse)
            )
            work = TileAttention(tile, own, own_out, own_lse, k_here, v_here, scale)
            if not tile.candidates:
                work.attend_all()
                continue
            positions = work.attend_kept(thetas, config, result)
            if return_kept:
                result.kept_keys += [KeptKeys(number, head, tile.start, kept) for head, kept in enumerate(positions)]
    if sinks is not None:
        result.out, result.lse = join_sinks(result.out, result.lse, sinks)
    return result


class TileAttention:
    """One tile of one sequence.

    Args:
        tile: which rows.
        q: (Hkv, G, R, D), these rows.
        out: (Hkv, G, R, Dv), where their output goes.
        lse: (Hkv, G, R), where their log-sum-exp goes, in the dtype of sums.
        k: (Hkv, n, D), the whole sequence's keys.
        v: (Hkv, n, Dv).
        scale: factor of the dot products.
    """

    def __init__(self, tile: Tile, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.tile, self.q, self.out, self.lse, self.k, self.v, self.scale = tile, q, out, lse, k, v, scale

    def attend_all(self) -> None:
        """Every key: the rows' own and, where there are any, those before them."""
        start, stop = self.tile.start, self.tile.stop
        found = self._part(self.q, self.k[:, start:stop], self.v[:, start:stop], causal=True)
        if start > 0:
            found = merge(*found, *self._part(self.q, self.k[:, :start], self.v[:, :start]))
        self.out.copy_(found[0])
        self.lse.copy_(found[1])

    def attend_kept(self, thetas: Sequence[float], config: AnchorAttentionConfig, result: AnchorResult) -> list[Tensor]:
        """Init, local and kept keys; counts into ``result``. Returns the kept positions, (kept,) per query head."""
        first, count = self.tile.first_candidate, self.tile.candidates
        top = self.init_and_local()
        margins = self.margins(top, config.block_size)
        kept = margins >= torch.tensor(thetas, dtype=top.dtype, device=top.device).mul_(-LOG2_E)[:, None]
        positions = []
        for head, kept_count in enumerate(kept.sum(1).tolist()):
            if config.max_keep is not None and kept_count > config.max_keep:
                index = margins[head].topk(config.max_keep).indices.sort().values + first
            else:
                index = kept[head].nonzero()[:, 0] + first
            dense = len(index) > config.dense_share(DENSE_SHARE) * count
            if dense:
                index = torch.arange(first, first + count, device=top.device)
            if len(index):
                self._attend_positions(head, slice(first, first + count) if len(index) == count else index)
            result.candidates += count
            result.kept += len(index)
            result.dense_tiles += dense
            result.sparse_tiles += not dense
            positions.append(index)
        return positions

    def _attend_positions(self, head: int, index: slice | Tensor) -> None:
        """Merge the keys at some positions into one head's output; a slice is read in place."""
        key_head, member = divmod(head, self.q.shape[1])
        place = slice(key_head, key_head + 1), slice(member, member + 1)
        k, v = self.k[key_head], self.v[key_head]
        k, v = (x[index] if isinstance(index, slice) else x.index_select(0, index) for x in (k, v))
        found = self._part(self.q[place], k[None], v[None])
        self.out[place], self.lse[place] = merge(self.out[place], self.lse[place], *found)

    def _part(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        return partial_attention(q, k, v, scale=self.scale, causal=causal)

    def init_and_local(self) -> Tensor:
        """Write output and log-sum-exp over [0, a) and [l, t]; returns the rows' largest logit, (H, R), base 2."""
        tile = self.tile
        k, v = (
            torch.cat([x[:, : tile.first_candidate], x[:, tile.last_candidate : tile.stop]], 1)
            for x in (self.k, self.v)
        )
        top = torch.empty_like(self.lse)
        for key_head, rows, sweep in grouped_sweep(self.q, k, v, scale=self.scale, causal=True, dtype=top.dtype):
            place = key_head, slice(None), rows
            shape = top[place].shape
            top[place] = sweep.top.view(shape)
            out, lse = sweep.finish()
            self.out[place], self.lse[place] = out.view(*shape, -1), lse.view(shape)
        return top.flatten(0, 1)

    def margins(self, top: Tensor, block_size: int) -> Tensor:
        """How far each candidate is above the anchor of the averaged rows that like it best, base 2: (H, candidates).

        margin_j = max over blocks of mean(q) . k_j - mean(top); ``top`` (H, R).
        """
        group = self.q.shape[1]
        blocks = list(self.tile.blocks(block_size))
        anchors = torch.stack([top[:, rows].mean(1) for rows in blocks], 1)
        means = torch.stack([self.q[:, :, rows].mean(2, dtype=top.dtype) for rows in blocks], 2)
        q = means.mul_(self.scale * LOG2_E).flatten(0, 1)
        margins = top.new_empty(len(q), self.tile.candidates)
        for key_head, keys in enumerate(self.k):
            heads = slice(key_head * group, (key_head + 1) * group)
            for start in range(0, self.tile.candidates, COLUMNS):
                stop = min(start + COLUMNS, self.tile.candidates)
                k = keys[self.tile.first_candidate + start : self.tile.first_candidate + stop].to(q.dtype)
                margins[heads, start:stop] = (q[heads] @ k.T).sub_(anchors[heads][..., None]).amax(1)
        return margins
