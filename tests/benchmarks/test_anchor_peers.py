"""Other methods' selection rules against their papers' formulas, written out in loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_memeff.benchmarks import anchor_peers
from hf_memeff.benchmarks.anchor_peers import (
    FlexPrefill,
    XAttention,
    block_means,
    causal_softmax,
    js_distance,
    sinks_window,
    smallest_cover,
    vertical_slash,
    vertical_slash_sums,
)

N, D, SCALE = 27, 6, 0.7


@pytest.fixture
def qk() -> tuple[Tensor, Tensor]:
    """Queries and keys (N, D) of one head, spread enough for weights to differ."""
    return torch.randn(N, D) * 1.5, torch.randn(N, D) * 1.5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 rows, so that 27 rows make three and a part."""
    monkeypatch.setattr(anchor_peers, "BLOCK", 8)
    monkeypatch.setattr(block_means, "__defaults__", (8,))


def weights_by_loops(q: Tensor, k: Tensor) -> list[list[float]]:
    """Causal softmax, row by row."""
    rows = []
    for i in range(N):
        scores = [math.exp(SCALE * float(q[i] @ k[j])) if j <= i else 0.0 for j in range(N)]
        rows.append([score / sum(scores) for score in scores])
    return rows


def causal(mask: Tensor, rows: Tensor) -> list[set[int]]:
    """The keys of each row."""
    return [{j for j in range(N) if mask[r, j] and j <= i} for r, i in enumerate(rows.tolist())]


def fewest(values: dict[int, float], share: float) -> set[int]:
    """Greedy: the largest values until they sum to a share of the whole."""
    total, chosen, reached = sum(values.values()), set(), 0.0
    for index in sorted(values, key=values.__getitem__, reverse=True):
        if reached >= share * total:
            break
        chosen.add(index)
        reached += values[index]
    return chosen


def test_streaming_llm() -> None:
    rows = torch.tensor([0, 5, 20])
    expected = [{0}, {0, 1, 3, 4, 5}, {0, 1, 18, 19, 20}]
    assert causal(sinks_window(rows, N, window=3, sinks=2), rows) == expected


def test_causal_softmax(qk: tuple[Tensor, Tensor]) -> None:
    rows = torch.tensor([0, 7, 26])
    found = causal_softmax(qk[0][rows], qk[1], SCALE, rows)
    torch.testing.assert_close(found, torch.tensor(weights_by_loops(*qk))[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("count", "ratio"), [(1, 1.0), (3, 2.0), (6, 0.5), (40, 1.0)])
def test_minference(qk: tuple[Tensor, Tensor], count: int, ratio: float) -> None:
    last, weights = 5, weights_by_loops(*qk)
    vertical = {j: sum(weights[i][j] for i in range(N - last, N)) for j in range(N)}
    slash = {d: sum(weights[i][i - d] for i in range(N - last, N) if i >= d) for d in range(N)}
    best_v = set(sorted(vertical, key=vertical.__getitem__, reverse=True)[:count])
    best_s = set(sorted(slash, key=slash.__getitem__, reverse=True)[: max(1, round(count * ratio))])
    expected = [{j for j in range(i + 1) if j in best_v or i - j in best_s} for i in range(N)]
    rows = torch.arange(N)
    mask = vertical_slash(*vertical_slash_sums(*qk, SCALE, last), rows, count, ratio)
    assert causal(mask, rows) == expected


def test_js_distance() -> None:
    p, q = [0.5, 0.5, 0.0], [0.1, 0.6, 0.3]
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    terms = [x * math.log(x / m) for dist in (p, q) for x, m in zip(dist, middle, strict=True) if x]
    assert js_distance(torch.tensor(p), torch.tensor(q)).item() == pytest.approx(math.sqrt(sum(terms) / 2), rel=1e-5)
    assert js_distance(torch.tensor(p), torch.tensor(p)).item() < 1e-3


@pytest.mark.parametrize("gamma", [0.1, 0.6, 0.9, 1.0])
def test_flexprefill_vertical_slash(qk: tuple[Tensor, Tensor], gamma: float) -> None:
    weights = weights_by_loops(*qk)
    head = FlexPrefill(*qk, SCALE, tau=0.0)
    assert not head.query_aware
    vertical = {j: sum(weights[i][j] for i in range(N - 8, N)) / 8 for j in range(N)}
    slash = {d: sum(weights[i][i - d] for i in range(N - 8, N) if i >= d) / 8 for d in range(N)}
    best_v, best_s = fewest(vertical, gamma), fewest(slash, gamma)
    rows = torch.arange(N)
    found = causal(head.mask(rows, gamma), rows)
    for i in range(N):
        lines = {j for j in range(i + 1) if j in best_v or i - j in best_s}
        assert found[i] == lines | {j for j in range(i + 1) if j < 8 or j // 8 == i // 8}


@pytest.mark.parametrize("gamma", [0.1, 0.6, 0.9])
def test_flexprefill_query_aware(qk: tuple[Tensor, Tensor], gamma: float) -> None:
    q, k = qk
    head = FlexPrefill(q, k, SCALE, tau=2.0)
    assert head.query_aware
    blocks = [range(start, min(start + 8, N)) for start in range(0, N, 8)]
    mean_q = [sum(q[i] for i in block) / len(block) for block in blocks]
    mean_k = [sum(k[j] for j in block) / len(block) for block in blocks]
    flat = {}
    for a in range(4):
        scores = [math.exp(SCALE * float(mean_q[a] @ mean_k[b])) for b in range(a + 1)]
        flat |= {4 * a + b: score / sum(scores) for b, score in enumerate(scores)}
    chosen = fewest(flat, gamma)
    rows = torch.tensor([0, 9, 23, 26])
    expected = [
        {j for j in range(i + 1) if j < 8 or j // 8 == i // 8 or 4 * (i // 8) + j // 8 in chosen} for i in rows.tolist()
    ]
    assert causal(head.mask(rows, gamma), rows) == expected


def test_flexprefill_takes_the_estimate_where_it_is_close() -> None:
    same = torch.ones(N, D)  # every key alike: the pooled estimate of whole blocks is nearly the attention itself
    assert FlexPrefill(same, same, SCALE, tau=0.3).query_aware
    far = torch.randn(N, D) * 8
    assert not FlexPrefill(far, far, SCALE, tau=0.3).query_aware


@pytest.mark.parametrize("threshold", [0.2, 0.7, 0.95])
@pytest.mark.parametrize("stride", [2, 4])
def test_xattention(qk: tuple[Tensor, Tensor], threshold: float, stride: int) -> None:
    q, k = (torch.cat([x, torch.zeros(5, D)]) for x in qk)  # four whole blocks
    squares = 32 // stride
    score = [[0.0] * 4 for _ in range(4)]
    for g in range(squares):
        row = {}
        for h in range(g + 1):
            if h * stride < N:
                antidiagonal = sum(float(q[g * stride + stride - 1 - t] @ k[h * stride + t]) for t in range(stride))
                row[h] = math.exp(SCALE * antidiagonal / stride)
        for h, value in row.items():
            score[g * stride // 8][h * stride // 8] += value / sum(row.values())
    rows = torch.arange(N)
    found = causal(XAttention(*qk, SCALE, stride).mask(rows, threshold), rows)
    for i in range(N):
        a = i // 8
        chosen = {0, a}
        for b in sorted(range(4), key=score[a].__getitem__, reverse=True):
            if sum(score[a][c] for c in chosen) < threshold * sum(score[a]) and b not in chosen:
                chosen.add(b)
        assert found[i] == {j for j in range(i + 1) if j // 8 in chosen}


def test_smallest_cover_is_the_fewest_entries() -> None:
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert smallest_cover(weights, 0.4).tolist() == [[False, True, False, False]]
    assert smallest_cover(weights, 0.41).tolist() == [[False, True, False, True]]
    assert smallest_cover(weights, 0.0).tolist() == [[False] * 4]
