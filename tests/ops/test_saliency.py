"""Scores of tokens, against whole attention matrices."""

from __future__ import annotations

import pytest
import torch

from hf_memeff.ops import attention
from hf_memeff.ops.attention import ScoreRule
from hf_memeff.ops.saliency import (
    attention_saliency,
    gradient_saliency,
    query_positions,
    random_saliency,
    value_norm_saliency,
)
from ops.test_attention import BATCH, HEADS, LENGTH, RULES, tensors, whole


@pytest.fixture(params=["one tile", "tiles of a row"])
def tile(request, monkeypatch):
    if request.param != "one tile":
        monkeypatch.setattr(attention, "_TILE_BYTES", 1)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_attention_from_some_rows(name, given, tile):
    q, k, v = tensors()
    rule = RULES[name]
    _, lse, p = whole(q, k, v, rule)
    rows = torch.tensor([[3, 4, 12], [0, 5, 7]])
    expected = torch.stack([p[b][:, rows[b]].sum((0, 1)) for b in range(BATCH)])
    got = attention_saliency(q, k, rule, rows, None, lse if given else None)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    alive = torch.tensor([[True, True, False], [True, True, True]])
    expected = torch.stack([p[b][:, rows[b][alive[b]]].sum((0, 1)) for b in range(BATCH)])
    got = attention_saliency(q, k, rule, rows, alive, lse if given else None)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    weights = torch.rand(rows.shape, dtype=torch.float64)
    expected = torch.stack([(p[b][:, rows[b]] * weights[b, :, None]).sum((0, 1)) for b in range(BATCH)])
    got = attention_saliency(q, k, rule, rows, None, lse if given else None, weights)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["causal", "bool mask", "softcap"])
def test_attention_from_all_rows(name, tile):
    q, k, v = tensors()
    _, lse, p = whole(q, k, v, RULES[name])
    rows = torch.arange(LENGTH).expand(BATCH, -1)
    got = attention_saliency(q, k, RULES[name], rows, None, lse)
    torch.testing.assert_close(got, p.sum((1, 2)), rtol=1e-9, atol=1e-9)
    assert got.sum().item() == pytest.approx(BATCH * HEADS * LENGTH)


@pytest.mark.parametrize("given", [True, False])
def test_a_sequence_asked_everywhere_beside_one_that_is_not(given):
    """As a batch of a token classifier: as many slots as tokens, which hold all rows of one sequence alone."""
    q, k, v = tensors()
    _, lse, p = whole(q, k, v, RULES["causal"])
    asked = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    asked[0], asked[1, [4, 9]] = True, True
    rows, alive = query_positions(asked)
    assert rows.shape == (BATCH, LENGTH) and alive is not None
    expected = torch.stack([p[b][:, asked[b]].sum((0, 1)) for b in range(BATCH)])
    got = attention_saliency(q, k, RULES["causal"], rows, alive, lse if given else None)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_no_whole_matrix_is_built(monkeypatch):
    """With small tiles the largest tensor of scores stays below a fraction of the matrix."""
    q = torch.randn(1, 2, 512, 8)
    sizes = []
    own = attention.capped_scores

    def watched(*args):
        s = own(*args)
        sizes.append(s.numel())
        return s

    monkeypatch.setattr("hf_memeff.ops.saliency.capped_scores", watched)
    rows = torch.arange(512)[None]
    attention_saliency(q, q, ScoreRule(0.3), rows, None, torch.zeros(1, 2, 512))
    assert max(sizes) <= 2 * 64 * 512 and sum(sizes) <= 0.6 * 2 * 512 * 512


def test_values_and_gradients():
    v = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    expected = v.float().permute(0, 2, 1, 3).reshape(2, 5, 12).norm(dim=-1)
    got = value_norm_saliency(v)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    g = torch.randn(2, 5, 7, dtype=torch.float16)
    torch.testing.assert_close(gradient_saliency(g), g.float().norm(dim=-1))


def test_random_scores_come_from_their_seed_alone():
    before = torch.get_rng_state()
    first = random_saliency((2, 9), 7, torch.device("cpu"))
    torch.manual_seed(1)
    assert torch.equal(first, random_saliency((2, 9), 7, torch.device("cpu")))
    assert not torch.equal(first, random_saliency((2, 9), 8, torch.device("cpu")))
    torch.set_rng_state(before)
    random_saliency((2, 9), 7, torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


def test_positions_of_the_rows_that_are_asked():
    predicted = torch.zeros(2, 10, dtype=torch.bool)
    predicted[0, [2, 3, 7, 8, 9]] = True
    predicted[1, [4]] = True
    positions, alive = query_positions(predicted)
    assert positions[0].tolist() == [2, 3, 7, 8, 9] and positions[1, 0] == 4
    assert alive.tolist() == [[True] * 5, [True] + [False] * 4]
    positions, alive = query_positions(predicted, 2)
    assert positions[0].tolist() == [2, 7] and positions[1, 0] == 4 and alive.tolist() == [[True, True], [True, False]]
    everything, alive = query_positions(torch.ones(2, 4, dtype=torch.bool))
    assert everything.tolist() == [[0, 1, 2, 3]] * 2 and alive is None
    none, alive = query_positions(torch.zeros(2, 4, dtype=torch.bool))
    assert none.shape == (2, 0) and alive is None
