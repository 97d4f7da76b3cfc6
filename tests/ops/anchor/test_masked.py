"""Dense attention with softcap, sinks, masks and dropout against the formula, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_memeff.ops import attention
from hf_memeff.ops.anchor.masked import masked_attention


def formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The same with repeated keys and one whole score matrix."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, h, n, d, dtype=dtype, requires_grad=True) for h, n, d in ((4, 9, 6), (2, 13, 6), (2, 13, 5))]


CAUSAL = torch.ones(9, 13, dtype=torch.bool).tril(4)[None, None]


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL.double().log()], ids=["none", "bool", "added"])
@pytest.mark.parametrize("tile_bytes", [2**23, 2000])
def test_values_and_gradients(
    mask: Tensor | None, softcap: float | None, sink: bool, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_TILE_BYTES", tile_bytes)
    q, k, v = tensors()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if sink else None
    wanted = [q, k, v, *([sinks] if sinks is not None else [])]
    out = masked_attention(q, k, v, mask, scale=0.3, softcap=softcap, sinks=sinks)
    expected = formula(q, k, v, mask, 0.3, softcap, sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, wanted, g)
    for got, right in zip(found, torch.autograd.grad(expected, wanted, g), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


def test_a_row_without_keys_is_zero() -> None:
    q, k, v = tensors()
    mask = CAUSAL.clone()
    mask[..., 3, :] = False
    out = masked_attention(q, k, v, mask, scale=0.3)
    assert not out[:, :, 3].any() and out.isfinite().all()


def test_dropout_drops_and_keeps_the_mean() -> None:
    q, k, v = tensors()
    torch.manual_seed(0)
    many = torch.stack([masked_attention(q, k, v, CAUSAL, scale=0.3, dropout=0.5).detach() for _ in range(400)])
    assert many.std(0).min() > 0.01
    torch.testing.assert_close(many.mean(0), masked_attention(q, k, v, CAUSAL, scale=0.3).detach(), rtol=0, atol=0.3)


def test_half_precision_keeps_its_dtype() -> None:
    q, k, v = (x.detach().to(torch.bfloat16) for x in tensors())
    out = masked_attention(q, k, v, CAUSAL, scale=0.3, softcap=0.7)
    assert out.dtype == torch.bfloat16
    expected = formula(*(x.double() for x in (q, k, v)), CAUSAL, 0.3, 0.7, None)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.03)
