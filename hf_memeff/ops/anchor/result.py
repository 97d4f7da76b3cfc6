"""What a backend returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class KeptKeys:
    """Candidates that one query head keeps for one tile of rows.

    Attributes:
        segment: index of the segment.
        head: query head.
        start: position of the tile's first query row.
        positions: (kept,) ascending positions in the sequence.
    """

    segment: int
    head: int
    start: int
    positions: Tensor


@dataclass
class AnchorResult:
    """Output of one call and what it cost.

    Attributes:
        out: (B, H, Nq, Dv); rows outside every segment are 0.
        lse: (B, H, Nq), float32 (float64 for float64 inputs); rows outside every segment are -inf.
        candidates: candidate keys, summed over query heads and tiles.
        kept: how many of them were attended, those of dense tiles included.
        sparse_tiles: tiles with candidates, summed over query heads, that ran over kept keys.
        dense_tiles: the same that ran over all keys.
        kept_keys: the kept sets, where asked for.
    """

    out: Tensor
    lse: Tensor
    candidates: int = 0
    kept: int = 0
    sparse_tiles: int = 0
    dense_tiles: int = 0
    kept_keys: list[KeptKeys] = field(default_factory=list)
