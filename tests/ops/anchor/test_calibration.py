"""Thresholds against a search over the reference, and recall against whole score matrices."""

from __future__ import annotations

import pytest
import torch

from hf_memeff.ops.anchor import calibration
from hf_memeff.ops.anchor.calibration import LEAST_THETA, least_thresholds, row_recall
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.tiling import Segment
from ops.anchor._inputs import SUPERBLOCK, inputs, run, settings, whole


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
def test_thresholds_reach_the_target_in_every_tile_and_no_smaller_ones_do(
    target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SAMPLED_ROWS", 1)
    q, k, v = inputs(1, 3, 1, 4 * SUPERBLOCK, seed=3)
    config = settings()
    thetas = least_thresholds(q, k, v, whole(q, k), config, 0.25, target)
    for head, theta in enumerate(thetas.tolist()):
        one = q[:, head : head + 1], k, v
        tiles = [recall_of(theta + 1e-4, *one, config)[0, 0].split(SUPERBLOCK)[b].mean() for b in (1, 2, 3)]
        assert min(tiles) >= target - 1e-4
        assert theta > LEAST_THETA
        less = [recall_of(theta - 1e-3, *one, config)[0, 0].split(SUPERBLOCK)[b].mean() for b in (1, 2, 3)]
        assert min(less) < target


def test_a_head_that_needs_no_candidates_gets_the_least_theta() -> None:
    q, k, v = inputs(1, 2, 1, 4 * SUPERBLOCK)
    thetas = least_thresholds(q, k, v, whole(q, k), settings(), 0.25, 0.05)
    assert thetas.tolist() == [LEAST_THETA] * 2


def test_the_whole_mass_takes_every_key() -> None:
    q, k, v = inputs(1, 2, 1, 4 * SUPERBLOCK)
    thetas = least_thresholds(q, k, v, whole(q, k), settings(), 0.25, 1.0)
    result = run("torch", q, k, v, settings(), thetas=[x + 1e-4 for x in thetas.tolist()])
    assert result.kept == result.candidates


def test_text_without_candidates_calibrates_nothing() -> None:
    q, k, v = inputs(queries=SUPERBLOCK)
    assert least_thresholds(q, k, v, whole(q, k), settings(), 0.25, 0.95) is None


def test_sampled_rows_come_close_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, 1, 512, seed=4)
    config = settings(step=16)
    sampled = least_thresholds(q, k, v, whole(q, k), config, 0.25, 0.8)
    monkeypatch.setattr(calibration, "_SAMPLED_ROWS", 1)
    torch.testing.assert_close(sampled, least_thresholds(q, k, v, whole(q, k), config, 0.25, 0.8), rtol=0, atol=0.3)
