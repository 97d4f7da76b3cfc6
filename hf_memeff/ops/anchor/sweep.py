"""A running softmax over keys that come in parts: the maximum, sum and accumulator of some rows, as in FlashAttention
(arXiv 2205.14135, algorithm 1), with whole matrix products in place of a kernel.

It takes a fifth longer than the CPU's flash kernel, and hands out the rows' maximum, which no kernel does and for which
a matrix product of its own would take longer still. Scores are kept in base 2, s = (q . k) scale log2(e): on a CPU
torch's exp2 takes half the time of its exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)

ROWS = 768
COLUMNS = 1024
"""A tile of scores: 3 MiB in float32, which stays in a core's share of the last cache during the six passes over it."""

_MOST_ROWS = 256  # of one head: half of a block's own scores, on the diagonal, are computed for nothing


def block_rows(heads: int) -> int:
    """Rows of a block that make, of so many heads together, a matrix of about ``ROWS`` rows."""
    return min(_MOST_ROWS, max(16, ROWS // heads))


def row_blocks(rows: int, heads: int) -> Iterator[slice]:
    """Cut rows into blocks of `block_rows`."""
    size = block_rows(heads)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class Sweep:
    """Rows on their way over keys.

    Args:
        q: (M, D), scaled by scale * log2(e), float32 or float64.
        scratch: room for scores, at least ``COLUMNS`` times M elements of the dtype of ``q``.

    Attributes:
        top: (M, 1), largest score so far; this and the others are there after the first keys.
        total: (M, 1), sum of 2^(s - top).
        mixed: (M, Dv), sum of 2^(s - top) v.
    """

    top: Tensor
    total: Tensor
    mixed: Tensor

    def __init__(self, q: Tensor, scratch: Tensor) -> None:
        self.q, self.scratch, self.fresh = q, scratch, True

    def see(self, k: Tensor, v: Tensor) -> None:
        """Take in keys (K, D) with values (K, Dv) that every row sees."""
        for start in range(0, len(k), COLUMNS):
            self._take(k[start : start + COLUMNS], v[start : start + COLUMNS], None)

    def see_causal(self, k: Tensor, v: Tensor, later: Tensor) -> None:
        """Take in keys of which the last are the rows' own; ``later`` (R, R) is -inf above the diagonal, else 0.

        M is a multiple of R: the rows of several heads, one head after the other. R is at most ``COLUMNS``, so that one
        tile holds the whole diagonal.
        """
        stop = len(k)
        while stop > 0:  # from the diagonal back, so that one tile holds all of it and no row starts without a key
            start = max(0, stop - COLUMNS)
            self._take(k[start:stop], v[start:stop], later if stop == len(k) else None)
            stop = start

    def _take(self, k: Tensor, v: Tensor, later: Tensor | None) -> None:
        k, v = k.to(self.q.dtype), v.to(self.q.dtype)
        scores = self.scratch[: len(self.q) * len(k)].view(len(self.q), len(k))
        torch.mm(self.q, k.T, out=scores)
        if later is not None:
            scores.view(-1, len(later), len(k))[..., len(k) - len(later) :].add_(later)
        top = scores.amax(1, keepdim=True)
        if self.fresh:
            self.fresh, self.top = False, top
            weights = scores.sub_(top).exp2_()
            self.total, self.mixed = weights.sum(1, keepdim=True), weights @ v
            return
        top = torch.maximum(top, self.top)
        weights = scores.sub_(top).exp2_()
        decay = self.top.sub_(top).exp2_()
        self.top = top
        self.total.mul_(decay).add_(weights.sum(1, keepdim=True))
        self.mixed.mul_(decay).addmm_(weights, v)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output (M, Dv), in place of ``mixed``, and natural log-sum-exp (M, 1)."""
        return self.mixed.div_(self.total), self.total.log2().add_(self.top).div_(LOG2_E)


def grouped_sweep(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, dtype: torch.dtype
) -> Iterator[tuple[int, slice, Sweep]]:
    """Sweeps of blocks of rows over all keys, for the heads of each key-value head together.

    Args:
        q: (Hkv, G, R, D).
        k: (Hkv, K, D).
        v: (Hkv, K, Dv).
        scale: factor of the dot products.
        causal: the last R keys are the rows' own and row i sees those up to its own, and all keys before them; else
            every row sees every key.
        dtype: float32 or float64.

    Yields:
        Key-value head, rows, and their sweep, whose tensors are (G * rows, ...).
    """
    group, rows_total = q.shape[1], q.shape[2]
    size = min(rows_total, block_rows(group))
    scratch = q.new_empty(group * size * COLUMNS, dtype=dtype)
    later = torch.full((size, size), -torch.inf, dtype=dtype, device=q.device).triu_(1)
    for head, (keys, values) in enumerate(zip(k, v, strict=True)):
        for rows in row_blocks(rows_total, group):
            sweep = Sweep((q[head, :, rows].to(dtype) * (scale * LOG2_E)).flatten(0, 1), scratch)
            if causal:
                seen = slice(0, len(keys) - rows_total + rows.stop)
                block = rows.stop - rows.start
                sweep.see_causal(keys[seen], values[seen], later[:block, :block])
            else:
                sweep.see(keys, values)
            yield head, rows, sweep
