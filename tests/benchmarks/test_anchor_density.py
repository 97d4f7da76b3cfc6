"""Recall, density and tuning of selection rules; AnchorAttention's own rule is the reference's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hf_memeff.benchmarks.anchor_density import PeerPlan, Sample
from hf_memeff.benchmarks.anchor_op import attend, attended_share, kept_mass
from hf_memeff.benchmarks.anchor_qkv import Qkv
from hf_memeff.benchmarks.anchor_rules import ONE_THETA, RULES, TITLES, anchor_selection
from hf_memeff.ops.anchor.config import AnchorAttentionConfig

N = 700


@pytest.fixture
def qkv() -> Qkv:
    """Four query heads over two, with some keys that many queries like."""
    k = torch.randn(1, 2, N, 8)
    k[:, :, ::90] *= 4
    return Qkv(torch.randn(1, 4, N, 8) * 1.5 + 0.5, k, torch.randn(1, 2, N, 6), 8**-0.5)


def config(**fields: object) -> AnchorAttentionConfig:
    return AnchorAttentionConfig(min_length=1, step=1, dense_above=None, **fields)


@pytest.mark.parametrize("theta", [5.0, 7.0, 9.0])
def test_own_rule_attends_what_the_op_attends(qkv: Qkv, theta: float) -> None:
    found = attend(qkv, config(theta=theta, backend="reference"), 0)
    select = anchor_selection(qkv, step=1)
    assert 0 < found.kept < found.candidates
    for kept in found.kept_keys:
        row = torch.tensor([kept.start])
        mask = select(kept.head, theta, row)[0]
        last = max(128, kept.start - 128)
        assert mask[128:last].nonzero()[:, 0].tolist() == (kept.positions - 128).tolist()
        assert mask[:128].all() and mask[last : kept.start + 1].all()


def test_recall_and_density_agree_with_the_op(qkv: Qkv) -> None:
    rows = torch.arange(N)
    sample = Sample(qkv, rows)
    recall, density = sample.measure(anchor_selection(qkv, step=1), [2.0] * 4)
    settings = config(theta=2.0)
    found, dense = attend(qkv, settings, 0), attend(qkv, AnchorAttentionConfig(), 0)
    assert density == pytest.approx(attended_share(found, settings), rel=1e-6)
    assert recall == pytest.approx((found.lse - dense.lse).exp().mean().item(), rel=1e-5)
    mass = kept_mass(found, dense, settings)
    assert mass.shape == (4, N - 384)  # the first three blocks see every key
    whole = (mass.sum() + 4 * 384) / (4 * N)
    assert recall == pytest.approx(whole.item(), rel=1e-5)


def test_recall_and_density_by_loops(qkv: Qkv) -> None:
    rows = torch.tensor([0, 3, 40, 699])
    chosen = {0: {0}, 3: {1, 2}, 40: set(range(0, 41, 5)), 699: set(range(350))}

    def select(head: int, parameter: float, wanted: torch.Tensor) -> torch.Tensor:
        assert parameter == head / 2
        return torch.tensor([[j in chosen[i] or j > i for j in range(N)] for i in wanted.tolist()])

    recalls = []
    for head in range(4):
        for i, keys in chosen.items():
            scores = torch.stack([qkv.q[0, head, i] @ qkv.k[0, head // 2, j] for j in range(i + 1)]) * qkv.scale
            recalls.append(float(scores.softmax(0)[sorted(keys)].sum()))
    recall, density = Sample(qkv, rows).measure(select, [0, 0.5, 1, 1.5])
    assert recall == pytest.approx(sum(recalls) / 16, rel=1e-4)
    assert density == pytest.approx((1 + 2 + 9 + 350) / (1 + 4 + 41 + 700))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.method} {rule.variant}".strip())
def test_every_rule_is_tuned_to_a_recall_and_keeps_more_with_more(qkv: Qkv, rule: object) -> None:
    sample = Sample(qkv, torch.arange(5, N, 9))
    select = rule.prepare(qkv)
    points = [sample.measure(select, [rule.value(share, N)] * 4) for share in (0.1, 0.4, 0.7, 0.9, 1.0)]
    assert all(a[0] <= b[0] + 1e-6 and a[1] <= b[1] for a, b in pairwise(points))
    assert points[-1][0] > 0.99
    if rule.method == ONE_THETA:  # 700 tokens are within its first superblock
        return
    wanted = (points[0][0] + 1) / 2
    parameter, recall, density = sample.tune(rule, select, wanted)
    assert abs(recall - wanted) < 0.02  # blocks of 128 keys are coarse in so short a text
    assert sample.measure(select, [parameter] * 4) == (recall, density)
    assert density < 1


def test_methods_and_layers() -> None:
    assert next(iter(TITLES)) == "anchor" and {rule.method for rule in RULES} == set(TITLES) - {"anchor"}
    assert PeerPlan().chosen(30) == [0, 6, 12, 17, 23, 29]
    assert PeerPlan(layers=(3, 99)).chosen(30) == [3]
