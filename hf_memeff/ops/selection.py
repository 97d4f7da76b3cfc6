"""Which tokens are kept: from scores and a budget to sorted positions (SAGE, ACL 2025, as the project defines it).

Everything here is the same for every block of a step but the scores. Shapes: B sequences of padded length S, K kept
tokens each. The number K depends on shapes and settings alone, but for ``adaptive`` budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of a batch.

    Attributes:
        positions: (B, K) int64: the kept tokens in ascending order, then the dead slots.
        alive: (B, K) bool, false for the dead slots of a sequence with fewer than K real tokens (each holds some other
            position and has to weigh nothing); ``None`` where no padding was told of.
    """

    positions: Tensor
    alive: Tensor | None = None

    def take(self, values: Tensor) -> Tensor:
        """``values`` (B, S, ...) at the kept positions, (B, K, ...), zero in dead slots, in its own storage."""
        index = self.positions.view(*self.positions.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
        return self.blank(values.gather(1, index))

    def blank(self, kept: Tensor) -> Tensor:
        """``kept`` (B, K, ...) with zeros in dead slots, whatever is there now."""
        if self.alive is None:
            return kept
        return kept.masked_fill_(~self.alive.view(*self.alive.shape, *[1] * (kept.dim() - 2)), 0)


def budget_tokens(token_budget: float, length: int) -> int:
    """K of a ratio: min(S, ceil(token_budget S)), at least one."""
    # a product such as 0.1 * 30 = 3.0000000000000004 must not round up
    return max(1, min(length, math.ceil(round(token_budget * length, 9))))


def adaptive_tokens(
    scores: Tensor, real: Tensor | None, attention_mass: float, min_tokens: int, multiple: int = 64
) -> int:
    """K of an adaptive budget: the fewest tokens of every sequence that hold so much of its score, the batch's maximum,
    rounded up.

    Args:
        scores: (B, S), not negative.
        real: (B, S) bool or ``None``.
        attention_mass: share of the scores' sum.
        min_tokens: fewest tokens.
        multiple: K is rounded up to a multiple of this, at most S.
    """
    length = scores.shape[1]
    masked = scores if real is None else scores.masked_fill(~real, 0.0)
    ordered = masked.double().sort(1, descending=True).values.cumsum(1)
    needed = (ordered < attention_mass * ordered[:, -1:]).sum(1).max() + 1
    kept = max(int(needed), min_tokens)
    return min(length, -(-kept // multiple) * multiple)


def always_kept(real: Tensor | None, starts: Tensor, sink_tokens: int, keep_last: bool) -> Tensor:
    """The tokens that are kept whatever their score: the first and the last real tokens of each packed sequence.

    Args:
        real: (B, S) bool, tokens that are not padding; ``None`` is all.
        starts: (B, S) bool, where a packed sequence starts.
        sink_tokens: how many first tokens.
        keep_last: whether the last token too.

    Returns:
        (B, S) bool.
    """
    real = torch.ones_like(starts) if real is None else real
    number = starts.cumsum(1)
    kept = _count_within(real, number) <= sink_tokens
    if keep_last:
        kept = kept | (_count_within(real.flip(1), number.flip(1)) == 1).flip(1)
    return kept & real


def _count_within(values: Tensor, numbers: Tensor) -> Tensor:
    """Running count of true ``values`` (B, S) that starts again where ``numbers`` (B, S) changes."""
    count = values.cumsum(1)
    fresh = torch.ones_like(values)
    fresh[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    before = torch.where(fresh, count - values.long(), -1).cummax(1).values
    return count - before


def select(scores: Tensor, real: Tensor | None, always: Tensor, count: int) -> KeptTokens:
    """Keep the ``count`` tokens with the highest scores.

    Args:
        scores: (B, S), finite; higher is more salient.
        real: (B, S) bool; padding is never kept. ``None`` is all.
        always: (B, S) bool, tokens that come before all others; they count inside ``count``, and where they are more
            than that their scores decide among them.
        count: K.

    Returns:
        The kept tokens; ties go to the lower position.
    """
    ranked = torch.nan_to_num(scores.double())
    order = ranked.sort(dim=1, descending=True, stable=True).indices
    rank = always.long() if real is None else torch.where(real, always.long(), -1)
    first = rank.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    chosen = order.gather(1, first)[:, :count]
    if real is None:
        return KeptTokens(chosen.sort(1).values)
    length = scores.shape[1]
    alive = real.gather(1, chosen)
    # dead slots go to the end, so that among themselves kept tokens are in the order of their positions
    order = (chosen + length * ~alive).sort(1).values
    dead = order >= length
    return KeptTokens(order - length * dead, ~dead)
