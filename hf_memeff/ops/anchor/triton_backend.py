"""AnchorAttention on a GPU: three kernels, four launches, and small sums between them.

Which keys are kept is decided from averaged rows and their anchors alone. So the first kernel makes only these, from
scores without values, the second compares, counts and lists, and the third computes attention over init, kept and
local keys in one online softmax. The local scores are computed twice, which needs none of the memory that a float32
accumulator for each row would take from one kernel to the next.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.result import AnchorResult, KeptKeys
from hf_memeff.ops.anchor.sweep import LOG2_E
from hf_memeff.ops.anchor.tiling import Segment, Tile, segment_tiles

DENSE_SHARE = 0.95
"""Kept share above which a head's superblock is dense. Gathered keys go through the same loop as others, so that there
is little to win before nearly all are kept; an estimate, not a measurement."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CHUNK = 1024
"""Candidates that one program of the stripe kernel compares."""

_DENSE_ROWS = 2048  # rows that see every key are cut into tiles of at most these, so that programs are alike


def is_available() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def runs_on(tensor: Tensor) -> bool:
    """Whether the kernels are made for a tensor's device and dtype: NVIDIA from compute capability 8.0 on."""
    return (
        tensor.is_cuda
        and torch.version.hip is None
        and tensor.dtype in DTYPES
        and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    )


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
    """As `dispatch.anchor_attention`. Temporaries are the averaged rows, H * Nq * D / block_size float32, the counts of
    chunks of candidates, and 4 bytes for each kept key of a head and superblock that does not keep all.

    Raises:
        ValueError: tensors that the kernels are not made for.
    """
    kernels = _kernels(q, k, v)
    # rows before heads in memory, as a model's next layer reads them
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=v.dtype, device=v.device).transpose(1, 2)
    result = AnchorResult(out, torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device))
    work = _Work.of(segments, config, q.device)
    if not work.tiles:
        return result
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        stripes = torch.tensor([0, -1], device=q.device).repeat(len(work.tiles), q.shape[1], 1)
        positions = torch.zeros(1, dtype=torch.int32, device=q.device)
        if work.sparse:
            selection = _Selection(kernels, q, k, work, thetas, config, scale)
            positions = selection.fill(stripes[: work.sparse], result)
        _attend(kernels, q, k, v, sinks, work, stripes, positions, scale, result)
    if return_kept:
        result.kept_keys = _kept_keys(work, stripes.tolist(), positions)
    return result


def _kernels(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The module of kernels, after a look at what they are asked to do."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"AnchorAttention got backend='triton' and q, k, v of {q.dtype}, {k.dtype}, {v.dtype}, expected one of "
            "float32, bfloat16 and float16 for all three. Fix: convert them, or pass backend='torch'."
        )
    from hf_memeff.ops.anchor import triton_kernels

    if not runs_on(q) and triton_kernels.COMPILED:
        raise ValueError(
            f"AnchorAttention got backend='triton' and tensors on {q.device}, expected an NVIDIA GPU of compute "
            "capability 8.0 or later. Fix: move them there, or pass backend='torch'."
        )
    return triton_kernels


@dataclass
class _Work:
    """What the kernels run over.

    Attributes:
        tiles: segment, its index and tile, first those with candidates.
        sparse: how many these are.
        table: the same for the kernels, see `triton_kernels.TILE_FIELDS`.
        block_size: rows that are averaged together.
    """

    tiles: list[tuple[int, Tile]]
    sparse: int
    table: Tensor
    block_size: int

    @classmethod
    def of(cls, segments: Sequence[Segment], config: AnchorAttentionConfig, device: torch.device) -> _Work:
        sparse, dense = [], []
        for number, segment in enumerate(segments):
            for tile in segment_tiles(segment, config):
                if tile.candidates:
                    sparse.append((number, tile))
                    continue
                for start in range(tile.start, tile.stop, _DENSE_ROWS):
                    dense.append((number, Tile(start, min(start + _DENSE_ROWS, tile.stop), 0, 0)))
        rows = [_table_row(segments[number], tile) for number, tile in sparse + dense]
        return cls(sparse + dense, len(sparse), torch.tensor(rows, dtype=torch.int64).to(device), config.block_size)

    @property
    def blocks(self) -> int:
        """Most blocks of rows that a tile with candidates has."""
        size = self.block_size
        return max((tile.stop - 1) // size - tile.start // size + 1 for _, tile in self.tiles[: self.sparse])

    @property
    def rows(self) -> int:
        """Most rows of a tile."""
        return max(tile.stop - tile.start for _, tile in self.tiles)


def _table_row(segment: Segment, tile: Tile) -> tuple[int, ...]:
    row = segment.query_start + tile.start - segment.offset
    return segment.batch, row, tile.start, tile.stop, segment.key_start, tile.first_candidate, tile.last_candidate


class _Selection:
    """The stripes of a call: averaged rows, cuts, counts, lists."""

    def __init__(
        self,
        kernels: Any,
        q: Tensor,
        k: Tensor,
        work: _Work,
        thetas: Sequence[float],
        config: AnchorAttentionConfig,
        scale: float,
    ) -> None:
        self.kernels, self.k, self.work, self.config = kernels, k, work, config
        self.heads, self.group, self.log2_scale = q.shape[1], q.shape[1] // k.shape[1], scale * LOG2_E
        tiles, device = work.sparse, q.device
        self.blocks = work.blocks
        self.parts = kernels.parts(q.dtype)
        self.candidates = [tile.candidates for _, tile in work.tiles[:tiles]]
        self.chunks = -(-max(self.candidates) // CHUNK)
        self.means = q.new_empty(tiles, self.blocks, self.heads, self.parts, q.shape[-1])
        self.anchors = torch.empty(tiles, self.blocks, self.heads, dtype=torch.float32, device=device)
        # a head's cut is the least margin that is kept, for each tile
        cuts = torch.tensor(thetas, dtype=torch.float32, device=device).mul_(-LOG2_E)
        self.cuts = cuts.repeat(tiles, 1)
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        names = ("quotas", "counts", "positions", "ranks", "digits")
        self.untouched = {**dict.fromkeys(names, nothing), "starts": nothing.long()}
        kernels.anchor_kernel[(tiles * self.blocks, self.heads)](
            q,
            k,
            work.table,
            self.means,
            self.anchors,
            *q.stride()[:3],
            *k.stride()[:3],
            self.log2_scale,
            self.heads,
            self.group,
            self.blocks,
            work.block_size,
            D=q.shape[-1],
            BLOCK_D=kernels.padded(q.shape[-1]),
            PARTS=self.parts,
        )

    def fill(self, stripes: Tensor, result: AnchorResult) -> Tensor:
        """Write start and length of each list to ``stripes`` (tiles, H, 2), -1 for all candidates; counts into
        ``result``. Returns the kept positions, (listed,) int32.
        """
        candidates = torch.tensor(self.candidates, device=self.k.device)[:, None]
        limit = self.config.max_keep
        if limit is not None and max(self.candidates) > limit:
            self._raise_cuts(limit)
        counts = torch.zeros(*self.cuts.shape, self.chunks, 2, dtype=torch.int32, device=self.k.device)
        self._run(self.kernels.COUNT.value, counts=counts)
        above, equal = counts.long().unbind(-1)
        if limit is not None:
            # keys at the cut are kept in order until the limit is reached
            left = (limit - above.sum(-1, keepdim=True)) - (equal.cumsum(-1) - equal)
            equal = torch.minimum(equal, left.clamp_(min=0))
        listed = above + equal
        kept = listed.sum(-1)
        dense = kept.double() > self.config.dense_share(DENSE_SHARE) * candidates.double()
        everything = dense | (kept == candidates)
        listed = listed.masked_fill(everything[..., None], 0)
        starts = (listed.flatten().cumsum(0) - listed.flatten()).view_as(listed)
        stripes[..., 0] = starts[..., 0]
        stripes[..., 1] = kept.masked_fill(everything, -1)
        attended = torch.where(everything, candidates, kept)
        total, result.kept, result.dense_tiles = torch.stack([listed.sum(), attended.sum(), dense.sum()]).tolist()
        result.candidates = sum(self.candidates) * self.heads
        result.sparse_tiles = dense.numel() - result.dense_tiles
        positions = torch.empty(max(1, total), dtype=torch.int32, device=self.k.device)
        if total:
            starts.masked_fill_(everything[..., None], -1)
            self._run(self.kernels.FILL.value, quotas=equal.int().contiguous(), starts=starts, positions=positions)
        return positions

    def _raise_cuts(self, limit: int) -> None:
        """Raise each cut to the margin of the key that comes ``limit``-th by margin, where more would be kept.

        A radix selection: the bits of this margin, eight at a time, from counts of the keys by these bits. Margins are
        computed anew each time, which costs 1 / block_size of their share of dense attention, and never stored.
        """
        left = torch.full(self.cuts.shape, limit, dtype=torch.int64, device=self.k.device)
        # the first eight bits are a signed number
        digits = torch.full(self.cuts.shape, -128, dtype=torch.int32, device=self.k.device)
        for shift in (24, 16, 8, 0):
            ranks = torch.zeros(*self.cuts.shape, 256, dtype=torch.int32, device=self.k.device)
            self._run(self.kernels.RANK.value, ranks=ranks, digits=digits, shift=shift)
            from_here = ranks.long().flip(-1).cumsum(-1).flip(-1)
            if shift == 24:
                more = from_here[..., 0] > limit
            # the highest value of these bits from which on there are as many keys as are left to find
            value = (from_here >= left[..., None]).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
            left -= (from_here.gather(-1, value) - ranks.gather(-1, value)).squeeze(-1)
            digits += value.squeeze(-1).int()
            if shift:
                digits *= 256
        bits = torch.where(digits < 0, digits ^ 0x7FFFFFFF, digits)
        self.cuts = torch.where(more, bits.view(torch.float32), self.cuts)

    def _run(self, mode: int, shift: int = 0, **tensors: Tensor) -> None:
        """One pass of the stripe kernel; what it does not touch in this mode is left out."""
        shape = self.kernels.stripe_shape(self.k.shape[-1], self.group, self.k.dtype)
        grid = self.work.sparse * self.chunks, self.k.shape[1] * -(-self.group // shape["HEADS"])
        self.kernels.stripe_kernel[grid](
            self.k,
            self.work.table,
            self.means,
            self.anchors,
            self.cuts,
            **{**self.untouched, **tensors},
            stride_k_batch=self.k.stride(0),
            stride_k_head=self.k.stride(1),
            stride_k_row=self.k.stride(2),
            log2_scale=self.log2_scale,
            heads=self.heads,
            group=self.group,
            blocks=self.blocks,
            block_size=self.work.block_size,
            chunks=self.chunks,
            mode=mode,
            shift=shift,
            D=self.k.shape[-1],
            BLOCK_D=self.kernels.padded(self.k.shape[-1]),
            PARTS=self.parts,
            CHUNK=CHUNK,
            **shape,
        )


def _attend(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    work: _Work,
    stripes: Tensor,
    positions: Tensor,
    scale: float,
    result: AnchorResult,
) -> None:
    """Output and log-sum-exp of all tiles, into ``result``."""
    heads, rows = q.shape[1], work.rows
    kernels.attend_kernel[lambda meta: (len(work.tiles) * -(-rows // meta["ROWS"]), heads)](
        q,
        k,
        v,
        result.out,
        result.lse,
        result.lse if sinks is None else sinks.float().contiguous(),
        work.table,
        stripes,
        positions,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *result.out.stride()[:3],
        *result.lse.stride()[:2],
        scale * LOG2_E,
        heads,
        heads // k.shape[1],
        rows,
        D=q.shape[-1],
        DV=v.shape[-1],
        BLOCK_D=kernels.padded(q.shape[-1]),
        BLOCK_DV=kernels.padded(v.shape[-1]),
        HAS_SINKS=sinks is not None,
    )


def _kept_keys(work: _Work, stripes: list[list[list[int]]], positions: Tensor) -> list[KeptKeys]:
    found = []
    for (number, tile), lists in zip(work.tiles[: work.sparse], stripes, strict=False):
        for head, (start, count) in enumerate(lists):
            if count < 0:
                kept = torch.arange(tile.first_candidate, tile.last_candidate, device=positions.device)
            else:
                kept = positions[start : start + count].long()
            found.append(KeptKeys(number, head, tile.start, kept))
    return found
