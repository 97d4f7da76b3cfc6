"""The baselines' tiled loss is the cross-entropy that it stands for, or the comparison would mean nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_memeff.benchmarks.tiled_loss import row_tiled_cross_entropy
from hf_memeff.memory import measure_peak_memory


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
def test_value_and_gradient_are_the_whole_loss_s(rows: int) -> None:
    hidden = torch.randn(23, 11, requires_grad=True)
    weight, labels = torch.randn(37, 11), torch.randint(37, (23,))
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    (true,) = torch.autograd.grad(3.0 * expected, hidden)
    got = row_tiled_cross_entropy(hidden, weight, labels, rows * 37 * 4)
    (gradient,) = torch.autograd.grad(3.0 * got, hidden)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient, true, rtol=1e-4, atol=1e-5)


def test_bfloat16_accumulates_in_float32() -> None:
    hidden = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight, labels = torch.randn(50, 32, dtype=torch.bfloat16), torch.randint(50, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        got = row_tiled_cross_entropy(hidden, weight, labels, 16 * 50 * 4)
    exact = F.cross_entropy(hidden.detach().float() @ weight.float().t(), labels, reduction="sum")
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(exact.item(), rel=5e-3)
    got.backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_no_more_than_a_tile_of_logits_is_alive() -> None:
    rows, classes, width = 256, 4096, 16
    hidden = torch.randn(rows, width, requires_grad=True)
    weight, labels = torch.randn(classes, width), torch.randint(classes, (rows,))
    hidden.grad = torch.zeros_like(hidden)
    tile_bytes = 16 * classes * 4
    peak = measure_peak_memory(lambda: row_tiled_cross_entropy(hidden, weight, labels, tile_bytes).backward(), "cpu")
    assert peak.peak_bytes is not None
    assert tile_bytes <= peak.peak_bytes < 2.5 * tile_bytes < rows * classes * 4
