"""Which keys other methods of sparse prefill attend to: their selection rules, without their kernels.

Each rule is written as its paper has it, for one head, at the finest granularity that the paper defines, which keeps
fewer keys than the blocks of a kernel would. What a rule computes once is apart from the one parameter that decides how
much it keeps, and more of that never keeps fewer keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


def sinks_window(rows: Tensor, keys: int, window: int, sinks: int = 4) -> Tensor:
    """StreamingLLM (arXiv 2309.17453): the first tokens and the last ones before a row.

    Args:
        rows: (R,) positions.
        keys: N.
        window: how many keys up to its own a row sees.
        sinks: how many first tokens.

    Returns:
        (R, N) bool, not yet causal.
    """
    position = torch.arange(keys)
    return (position < sinks) | (rows[:, None] - position < window)


def causal_softmax(q: Tensor, k: Tensor, scale: float, rows: Tensor) -> Tensor:
    """Dense attention weights (R, N) of the queries (R, D) at some positions (R,), in float32; ``k`` (N, D)."""
    scores = (q.float() @ k.float().T) * scale
    return scores.masked_fill_(torch.arange(len(k)) > rows[:, None], -torch.inf).softmax(-1)


def vertical_slash_sums(q: Tensor, k: Tensor, scale: float, last: int) -> tuple[Tensor, Tensor]:
    """Attention of the last queries summed over each key (vertical) and over each distance (slash).

    Args:
        q, k: (N, D).
        scale: factor of the dot products.
        last: how many last queries.

    Returns:
        Two (N,), by key and by distance, each of sum min(last, N).
    """
    rows = torch.arange(max(0, len(q) - last), len(q))
    weights = causal_softmax(q[rows], k, scale, rows)
    distance = rows[:, None] - torch.arange(len(k))
    slash = weights.new_zeros(len(k)).index_add_(0, distance.clamp(min=0).flatten(), weights.flatten())
    return weights.sum(0), slash


def lines(vertical: Tensor, slash: Tensor, rows: Tensor) -> Tensor:
    """(R, N) bool: keys on a chosen vertical (N,) or at a chosen distance (N,), up to each row's own."""
    keys = len(vertical)
    # a row's keys are a stretch of the distances in reverse: no list of R * N indices
    backwards = torch.cat([slash.flip(0), slash.new_zeros(keys)]).unfold(0, keys, 1)
    return backwards[keys - 1 - rows] | vertical


def vertical_slash(vertical: Tensor, slash: Tensor, rows: Tensor, count: int, slash_ratio: float) -> Tensor:
    """MInference (arXiv 2407.02490, algorithm 2): the keys and the distances that the last 64 queries attend to most.

    Args:
        vertical, slash: of `vertical_slash_sums` with ``last=64``.
        rows: (R,) positions.
        count: number of verticals.
        slash_ratio: slashes per vertical; in the paper it is searched for each head.

    Returns:
        (R, N) bool, not yet causal.
    """
    return lines(_most(vertical, count), _most(slash, round(count * slash_ratio)), rows)


def _most(sums: Tensor, count: int) -> Tensor:
    best = sums.topk(min(max(1, count), len(sums))).indices
    return torch.zeros(len(sums), dtype=torch.bool).index_fill_(0, best, True)


def smallest_cover(weights: Tensor, share: float) -> Tensor:
    """The fewest entries along the last dimension, largest first, that sum to a share of the whole; bool."""
    values, order = weights.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1) - values
    needed = before < share * values.sum(-1, keepdim=True)
    return torch.zeros_like(needed).scatter_(-1, order, needed)


def block_means(x: Tensor, size: int = BLOCK) -> Tensor:
    """(blocks, D): mean over each block of rows (N, D); the last block may be shorter."""
    return torch.stack([block.float().mean(0) for block in x.split(size)])


class FlexPrefill:
    """FlexPrefill (arXiv 2502.20766, algorithms 1 to 4) of one head, of which ``gamma`` is the main parameter.

    The last block of queries decides: where its attention, pooled by blocks of keys, is as averaged queries and keys
    estimate it (Jensen-Shannon distance below tau), blocks are chosen by that estimate for all rows ("query-aware"),
    else verticals and slashes by that block's own attention. Either way the fewest that sum to gamma. As in the
    authors' release the first block and the diagonal one are always kept; its least budget is left out.

    Args:
        q, k: (N, D).
        scale: factor of the dot products.
        tau: the paper's 0.1.
    """

    def __init__(self, q: Tensor, k: Tensor, scale: float, tau: float = 0.1) -> None:
        self.keys = len(k)
        self.vertical, self.slash = (sums / min(BLOCK, len(q)) for sums in vertical_slash_sums(q, k, scale, BLOCK))
        pooled_k = block_means(k)
        estimate = (q[-BLOCK:].float().mean(0) @ pooled_k.T * scale).softmax(-1)
        true = torch.stack([block.sum() for block in self.vertical.split(BLOCK)])
        self.distance = js_distance(estimate, true)
        self.query_aware = bool(self.distance < tau)
        if self.query_aware:
            scores = block_means(q) @ pooled_k.T * scale
            future = torch.ones_like(scores, dtype=torch.bool).triu_(1)
            self.blocks = scores.masked_fill_(future, -torch.inf).softmax(-1)

    def mask(self, rows: Tensor, gamma: float) -> Tensor:
        """(R, N) bool, not yet causal, of rows (R,)."""
        position = torch.arange(self.keys)
        always = (position < BLOCK) | (position // BLOCK == rows[:, None] // BLOCK)
        if not self.query_aware:
            return lines(smallest_cover(self.vertical, gamma), smallest_cover(self.slash, gamma), rows) | always
        chosen = smallest_cover(self.blocks.flatten(), gamma).view_as(self.blocks)
        return chosen[rows // BLOCK][:, position // BLOCK] | always


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence of two distributions (n,), natural logarithm."""
    middle = (p + q) / 2
    # as differences, since an entry that is 0 in both would divide by 0
    gain = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(middle, middle)
    return (gain.sum() / 2).clamp(min=0).sqrt()


class XAttention:
    """XAttention (arXiv 2503.16428, section 2) of one head, of which the threshold is the main parameter.

    A square of stride x stride scores stands for its antidiagonal, the sum of q_{g s + s - 1 - t} . k_{h s + t} over t,
    by s; a softmax over the squares of a row of squares, summed over blocks, scores the blocks, and each row of blocks
    keeps the fewest that sum to the threshold. As in the authors' release the first block and the diagonal one are
    kept first, and count.

    Args:
        q, k: (N, D).
        scale: factor of the dot products.
        stride: the paper's 8 or 16; it divides the block of 128.
    """

    def __init__(self, q: Tensor, k: Tensor, scale: float, stride: int = 8) -> None:
        self.keys = len(k)
        blocks = math.ceil(len(k) / BLOCK)
        q, k = (F.pad(x.float(), (0, 0, 0, blocks * BLOCK - len(x))).unflatten(0, (-1, stride)) for x in (q, k))
        scores = q.flip(1).flatten(1) @ k.flatten(1).T * (scale / stride)
        squares = torch.arange(len(scores))
        unseen = (squares > squares[:, None]) | (squares * stride >= self.keys)
        weights = scores.masked_fill_(unseen, -torch.inf).softmax(-1)
        side = BLOCK // stride
        self.blocks = weights.view(blocks, side, blocks, side).sum((1, 3))

    def mask(self, rows: Tensor, threshold: float) -> Tensor:
        """(R, N) bool, not yet causal, of rows (R,)."""
        number = torch.arange(len(self.blocks))
        always = (number == 0) | (number == number[:, None])
        needed = threshold * self.blocks.sum(1, keepdim=True)
        left = needed - (self.blocks * always).sum(1, keepdim=True)
        values, order = self.blocks.masked_fill(always, 0.0).sort(dim=-1, descending=True, stable=True)
        more = (values.cumsum(-1) - values < left) & (values > 0)
        chosen = torch.zeros_like(more).scatter_(-1, order, more) | always
        return chosen[rows // BLOCK][:, torch.arange(self.keys) // BLOCK]
