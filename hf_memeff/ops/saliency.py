"""How salient each token is in a block (SAGE, ACL 2025): scores that ``selection`` ranks.

Only the query rows that a score needs are looked at, in tiles: no S x S matrix is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memeff.ops.attention import ScoreRule, capped_scores, probabilities, row_tiles, rows_log_sum_exp
from hf_memeff.ops.precision import accumulation_dtype

_LOW = 32  # rows below which a tile's products are too thin to be fast


def query_positions(predicted: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Positions of the rows whose attention is scored.

    Args:
        predicted: (B, S) bool, the candidates (rows whose next token is a label).
        limit: take at most so many of a sequence's candidates, evenly spaced; ``None`` takes all.

    Returns:
        Positions (B, R), R being the most that a sequence has, ascending; and (B, R) bool, false where a sequence has
        fewer, or ``None`` where none has.
    """
    counts = predicted.sum(1)
    wanted = counts if limit is None else counts.clamp_max(limit)
    largest, smallest = int(wanted.max()), int(wanted.min())
    slots = torch.arange(largest, device=predicted.device)[None].expand(len(predicted), -1)
    # the n-th wanted row is candidate floor(n * candidates / wanted), which is n where all are wanted
    nth = slots * counts[:, None] // wanted.clamp_min(1)[:, None]
    order = predicted.logical_not().long().sort(dim=1, stable=True).indices  # candidates first, ascending
    positions = order.gather(1, nth.clamp_max(predicted.shape[1] - 1))
    return positions, None if smallest == largest else slots < wanted[:, None]


def attention_saliency(
    q: Tensor,
    k: Tensor,
    rule: ScoreRule,
    rows: Tensor,
    alive: Tensor | None = None,
    lse: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """How much attention some rows give to each token, summed over rows and heads.

    Args:
        q: (B, H, S, dh), all queries.
        k: (B, Hkv, S, dh).
        rule: how scores are made.
        rows: (B, R) positions of the rows that are asked.
        alive: (B, R) bool, false for slots that hold no row.
        lse: (B, H, S), the log-sum-exp of all rows where the attention kernel gave it.
        weights: (B, R), how much each row counts; ``None`` is 1 each.

    Returns:
        (B, S) in the accumulation dtype; without weights between 0 and H R.
    """
    batch, heads, length, size = q.shape
    total = torch.zeros(batch, length, dtype=accumulation_dtype(q.dtype), device=q.device)
    whole = alive is None and rows.shape[1] == length  # ascending and without repeats, so they are all rows
    if not whole:
        q = q.gather(2, rows[:, None, :, None].expand(-1, heads, -1, size))
        lse = lse.gather(2, rows[:, None].expand(-1, heads, -1)) if lse is not None else None
    if lse is None:
        lse = rows_log_sum_exp(q, k, rule, rows)
    if alive is not None:
        lse = lse.masked_fill(~alive[:, None], float("inf"))
    # with a limit that is read back, which would make an accelerator wait, low tiles skip the keys behind them
    bounded = rule.plainly_causal and q.device.type == "cpu"
    for tile in row_tiles(q, length, max(_LOW, length // 8) if bounded else None):
        first, limit = 0, length
        if bounded:
            first, limit = int(rows[:, tile].min()), int(rows[:, tile].max()) + 1
        s = capped_scores(q[:, :, tile], k[:, :, :limit], rule)
        s[..., first:] += rule.bias(rows[:, tile], s.dtype, range(first, limit))
        p = probabilities(s, lse[:, :, tile])
        if weights is None:
            total[:, :limit] += p.sum((1, 2))
        else:
            total[:, :limit] += torch.bmm(weights[:, None, tile].to(p.dtype), p.sum(1))[:, 0]
    return total


def value_norm_saliency(v: Tensor) -> Tensor:
    """Norm of each token's values, all heads together.

    Args:
        v: (B, Hkv, S, dv).

    Returns:
        (B, S), float32 (float64 for float64 inputs).
    """
    return v.to(accumulation_dtype(v.dtype)).square().sum((1, 3)).sqrt_()


def gradient_saliency(g: Tensor) -> Tensor:
    """Norm of the incoming gradient of each token.

    Args:
        g: (B, S, D).

    Returns:
        (B, S), float32 (float64 for float64 inputs).
    """
    return torch.linalg.vector_norm(g, dim=-1, dtype=accumulation_dtype(g.dtype))


def random_saliency(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """Uniform scores from a generator of their own (the random tokens of TokenTune, EMNLP 2024).

    Args:
        shape: (B, S).
        seed: of the generator; the same seed gives the same scores on every device.
        device: where the scores are wanted.

    Returns:
        (B, S), float32 in [0, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).to(device)
