"""Budgets, always-kept tokens and the choice itself."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memeff.ops.selection import KeptTokens, adaptive_tokens, always_kept, budget_tokens, select


@pytest.mark.parametrize(
    ("budget", "length", "expected"),
    [(0.25, 37, 10), (0.1, 30, 3), (0.3, 10, 3), (1e-9, 5, 1), (0.5, 1, 1), (1.0, 7, 7), (0.999999, 37, 37)],
)
def test_a_ratio_rounds_up_without_rounding_noise(budget, length, expected):
    """0.1 * 30 is 3.0000000000000004 in floating point; the budget is 3."""
    assert budget_tokens(budget, length) == expected


def test_every_ratio_keeps_its_share():
    for length in (1, 7, 64, 1000):
        for percent in range(1, 101):
            kept = budget_tokens(percent / 100, length)
            assert kept == max(1, -(-percent * length // 100))


def test_adaptive_budgets_follow_the_mass():
    flat = torch.ones(1, 200)
    peaked = torch.zeros(1, 200)
    peaked[0, :3] = 5.0
    assert adaptive_tokens(flat, None, 0.8, 8, multiple=1) == 160
    assert adaptive_tokens(peaked, None, 0.8, 8, multiple=1) == 8
    assert adaptive_tokens(peaked, None, 0.8, 1, multiple=1) == 3
    both = torch.cat([flat, peaked])
    assert adaptive_tokens(both, None, 0.8, 8, multiple=1) == 160  # the batch's maximum
    assert adaptive_tokens(both, None, 0.8, 8) == 192 and adaptive_tokens(peaked, None, 0.8, 8) == 64
    assert adaptive_tokens(flat[:, :10], None, 0.8, 300) == 10
    real = torch.arange(200)[None] < 10
    assert adaptive_tokens(flat, real, 0.8, 1, multiple=1) == 8  # padding holds no mass


def starts_at(length, *positions):
    starts = torch.zeros(1, length, dtype=torch.bool)
    starts[0, [0, *positions]] = True
    return starts


def kept_at(mask):
    return mask[0].nonzero().flatten().tolist()


def test_sinks_and_last_of_a_plain_sequence():
    starts = starts_at(9)
    assert kept_at(always_kept(None, starts, 3, True)) == [0, 1, 2, 8]
    assert kept_at(always_kept(None, starts, 0, True)) == [8]
    assert kept_at(always_kept(None, starts, 2, False)) == [0, 1]
    assert kept_at(always_kept(None, starts, 0, False)) == []


@pytest.mark.parametrize(("real", "expected"), [("000111111", [3, 4, 8]), ("111110000", [0, 1, 4]), ("000010000", [4])])
def test_padding_is_skipped_on_both_sides(real, expected):
    mask = torch.tensor([[c == "1" for c in real]])
    assert kept_at(always_kept(mask, starts_at(9), 2, True)) == expected


def test_every_packed_sequence_has_its_own():
    assert kept_at(always_kept(None, starts_at(10, 4, 5), 2, True)) == [0, 1, 3, 4, 5, 6, 9]
    real = torch.tensor([[True] * 8 + [False] * 2])
    assert kept_at(always_kept(real, starts_at(10, 4), 1, True)) == [0, 3, 4, 7]


def test_the_highest_scores_are_kept_in_order_and_ties_go_to_the_lower_position():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.9, 0.5, 0.0]])
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    assert select(scores, None, nothing, 3).positions.tolist() == [[1, 2, 3]]
    always = torch.tensor([[False, False, False, False, False, True]])
    kept = select(scores, None, always, 3)
    assert kept.positions.tolist() == [[1, 3, 5]] and kept.alive is None


def test_padding_fills_dead_slots_at_the_end():
    scores = torch.tensor([[9.0, 9.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    kept = select(scores, real, torch.zeros(2, 5, dtype=torch.bool), 4)
    assert kept.positions.tolist() == [[2, 3, 4, 0], [1, 2, 3, 4]]
    assert kept.alive.tolist() == [[True, True, True, False], [True] * 4]
    assert all(len(set(row)) == 4 for row in kept.positions.tolist())


def test_scores_that_are_not_numbers_do_not_lose_tokens():
    scores = torch.tensor([[float("nan"), 1.0, float("inf"), 2.0]])
    kept = select(scores, None, torch.zeros(1, 4, dtype=torch.bool), 2)
    assert kept.positions.shape == (1, 2) and 2 in kept.positions


def test_taking_tokens_copies_them_and_blanks_dead_slots():
    values = torch.arange(24.0).view(2, 4, 3)
    values[0, 3] = float("nan")
    kept = KeptTokens(torch.tensor([[1, 3], [0, 2]]), torch.tensor([[True, False], [True, True]]))
    taken = kept.take(values)
    assert taken.untyped_storage().nbytes() == 2 * 2 * 3 * 4
    assert taken.tolist() == [[[3.0, 4.0, 5.0], [0.0] * 3], [[12.0, 13.0, 14.0], [18.0, 19.0, 20.0]]]
    assert math.isnan(values[0, 3, 0])


@pytest.mark.parametrize("seed", range(5))
def test_selection_against_a_plain_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    batch, length, count = 3, 17, 7
    scores = torch.randint(0, 4, (batch, length), generator=generator).float()  # many ties
    real = torch.rand(batch, length, generator=generator) < 0.7
    always = (torch.rand(batch, length, generator=generator) < 0.2) & real
    kept = select(scores, real, always, count)
    for row in range(batch):
        ranked = sorted(
            (t for t in range(length) if real[row, t]), key=lambda t: (not always[row, t], -scores[row, t].item(), t)
        )
        alive = kept.positions[row][kept.alive[row]].tolist()
        assert alive == sorted(ranked[:count])


def test_more_always_kept_tokens_than_the_budget_compete_by_their_scores():
    """Many short packed sequences: the first ones must not take every slot."""
    scores = torch.tensor([[1.0, 0.0, 3.0, 0.0, 5.0, 0.0]])
    always = torch.tensor([[True, False, True, False, True, False]])
    assert select(scores, None, always, 2).positions.tolist() == [[2, 4]]
