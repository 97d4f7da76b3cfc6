"""From what a model says about its rows (padding, packing) to sequences, and to a mask where one is needed.

A layout is an integer tensor (B, K): 0 for a key that is padding, else the number of the sequence it belongs to. The
queries are the last Nq of the K keys' tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memeff.ops.anchor.tiling import Segment


def plain_segments(batch: int, queries: int, keys: int) -> list[Segment]:
    """One sequence per row of the batch, whose queries are its last tokens."""
    return [Segment(row, 0, queries, 0, keys) for row in range(batch)]


def layout_segments(layout: Tensor, queries: int) -> list[Segment] | None:
    """The sequences of a layout (B, K) that have queries among the last ``queries`` tokens.

    Returns:
        Segments, or ``None`` where a sequence has a gap, so that position is not distance from its first token.
    """
    offset = layout.shape[1] - queries
    segments = []
    for row, ids in enumerate(layout):
        names, lengths = torch.unique_consecutive(ids, return_counts=True)
        start, seen = 0, set()
        for name, length in zip(names.tolist(), lengths.tolist(), strict=True):
            if name in seen:
                return None
            if name != 0:
                seen.add(name)
                first = max(start, offset)
                if start + length > first:
                    segments.append(Segment(row, first - offset, start + length - first, start, start + length - start))
            start += length
    return segments


def restarts(position_ids: Tensor) -> Tensor | None:
    """Layout (B, N) of packed sequences, from positions (B, N) that start again at 0; ``None`` where none does."""
    again = (position_ids[:, 1:] == 0) & (position_ids.diff() != 1)
    if not bool(again.any()):
        return None
    return torch.nn.functional.pad(again.cumsum(1), (1, 0)) + 1


def boundaries(lengths: Tensor) -> Tensor | None:
    """Layout (1, N) of packed sequences from cumulative lengths (sequences + 1,), 0 first; ``None`` for one alone."""
    if lengths.numel() < 3:
        return None
    sizes = lengths.diff()
    return torch.repeat_interleave(torch.arange(1, len(sizes) + 1, device=sizes.device), sizes)[None]


def layout_mask(layout: Tensor, queries: int, window: int | None = None) -> Tensor:
    """Which key each query sees: causal, of its own sequence, not padding, and inside the window.

    Args:
        layout: (B, K).
        queries: Nq.
        window: how many keys up to its own position a query sees, or ``None`` for all.

    Returns:
        (B, 1, Nq, K), bool. Rows of padding see the real keys before them, as in transformers' own masks.
    """
    keys = layout.shape[1]
    position = torch.arange(keys, device=layout.device)
    distance = position[keys - queries :, None] - position
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    own = layout[:, keys - queries :, None]
    seen = seen & (layout != 0)[:, None, :] & ((own == layout[:, None, :]) | (own == 0))
    return seen[:, None]
