"""Thresholds against a search over the reference, and recall against whole score matrices."""

from __future__ import annotations

import pytest
import torch

from hf_memeff.ops.anchor import calibration
from hf_memeff.ops.anchor.calibration import MOST_CHEAP_THETA, least_thresholds, row_recall
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.tiling import Segment, segment_tiles
from ops.anchor._inputs import SUPERBLOCK, dense, inputs, kept_sets, run, settings, whole


def recall_of(
    theta: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: AnchorAttentionConfig
) -> torch.Tensor:
    """Share of each row's mass, from the reference's log-sum-exp."""
    every = run("reference", q, k, v, config, thetas=[float("inf")] * q.shape[1])
    return (run("reference", q, k, v, config, thetas=[theta] * q.shape[1]).lse - every.lse).exp()


def test_recall_is_the_share_of_mass_that_is_kept() -> None:
    q, k, v = inputs(2, 4, 2, 150)
    config = settings()
    segments = [Segment(0, 0, 150, 0, 150), Segment(1, 30, 120, 30, 120)]
    found = row_recall(q, k, v, segments, [1.0] * 4, config, 0.25)
    torch.testing.assert_close(found[:1], recall_of(1.0, q[:1], k[:1], v[:1], config), rtol=0, atol=1e-5)
    assert found[1, :, :30].isnan().all() and found[1, :, 30:].isfinite().all()
    assert found[:1].min() < 1


@pytest.mark.parametrize("target", [0.6, 0.8, 0.95])
def test_thresholds_reach_the_target_in_every_tile_and_much_smaller_ones_do_not(target: float) -> None:
    q, k, v = inputs(1, 3, 1, 4 * SUPERBLOCK, seed=3)
    config = settings()
    thetas = least_thresholds(q, k, v, whole(q, k), config, 0.25, target).theta
    expected = dense(q, k, v)

    def close_enough(head: int, theta: float) -> bool:
        one = q[:, head : head + 1], k, v
        recall = recall_of(theta, *one, config)[0, 0].split(SUPERBLOCK)[1:]
        out = run("reference", *one, config, thetas=[theta]).out[0, 0].split(SUPERBLOCK)[1:]
        right = expected[0, head].split(SUPERBLOCK)[1:]
        errors = [(o - e).norm() / e.norm() for o, e in zip(out, right, strict=True)]
        return min(r.mean() for r in recall) >= target - 1e-4 and max(errors) <= 1 - target + 1e-4

    for head, theta in enumerate(thetas.tolist()):
        assert close_enough(head, theta + 1e-4)
        assert not close_enough(head, theta - 0.5)


def test_mass_on_first_keys_does_not_hide_a_lost_output() -> None:
    q, k, v = inputs(1, 1, 1, 4 * SUPERBLOCK, seed=3)
    k[0, 0, 0], v[0, 0, 0] = 0, 0
    q[..., 0], k[0, 0, :, 0], k[0, 0, 0, 0] = 6.0, 0.0, 6.0  # most mass of every row, and nothing of its output
    config = settings()
    assert recall_of(-1e4, q, k, v, config)[:, :, SUPERBLOCK:].mean() > 0.9
    theta = least_thresholds(q, k, v, whole(q, k), config, 0.25, 0.9).theta.item()
    out = run("reference", q, k, v, config, thetas=[theta + 1e-4]).out
    assert (out - dense(q, k, v)).norm() <= 0.1 * dense(q, k, v).norm()


def test_a_head_that_needs_no_candidates_keeps_the_cheap_ones() -> None:
    q, k, v = inputs(1, 2, 1, 8 * SUPERBLOCK)
    v += 100.0  # whatever a row attends to, its output is nearly the same
    thetas = least_thresholds(q, k, v, whole(q, k), settings(), 0.25, 0.01).theta
    result = run("torch", q, k, v, settings(), thetas=[x + 1e-4 for x in thetas.tolist()])
    assert 0 < result.kept < 0.1 * result.candidates
    assert thetas.max() <= MOST_CHEAP_THETA


def test_the_whole_mass_takes_every_key() -> None:
    q, k, v = inputs(1, 2, 1, 4 * SUPERBLOCK)
    thetas = least_thresholds(q, k, v, whole(q, k), settings(), 0.25, 1.0).theta
    result = run("torch", q, k, v, settings(), thetas=[x + 1e-4 for x in thetas.tolist()])
    assert result.kept == result.candidates


def test_text_without_candidates_calibrates_nothing() -> None:
    q, k, v = inputs(queries=SUPERBLOCK)
    assert least_thresholds(q, k, v, whole(q, k), settings(), 0.25, 0.95) is None


def test_sampled_rows_come_close_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, 1, 512, seed=4)
    config = settings(step=16)
    every = least_thresholds(q, k, v, whole(q, k), config, 0.25, 0.8).theta
    monkeypatch.setattr(calibration, "_SAMPLED_ROWS", 32)
    sampled = least_thresholds(q, k, v, whole(q, k), config, 0.25, 0.8).theta
    torch.testing.assert_close(sampled, every, rtol=0, atol=0.4)


@pytest.mark.parametrize("target", [0.5, 0.9])
def test_scores_are_those_that_a_call_with_these_thresholds_computes(target: float) -> None:
    q, k, v = inputs(1, 3, 1, 150, 20, seed=3)
    config = settings()
    found = least_thresholds(q, k, v, whole(q, k), config, 0.25, target)
    result = run("torch", q, k, v, config, thetas=[x + 1e-5 for x in found.theta.tolist()])
    expected = 0.0
    for tile in segment_tiles(whole(q, k)[0], config):
        rows = tile.stop - tile.start
        expected += 3 * rows * (tile.start - tile.candidates + rows / 2)
        expected += rows * sum(len(kept) for key, kept in kept_sets(result).items() if key[2] == tile.start)
    assert found.scores == pytest.approx(expected)
