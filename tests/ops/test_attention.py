"""Attention with log-sum-exp, and its backward over kept rows, against autograd on whole matrices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_memeff.ops import attention
from hf_memeff.ops.attention import KeptAttention, ScoreRule, flash_forward, rows_attention, rows_log_sum_exp

BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 13, 4, 2, 6
KEPT = torch.tensor([[0, 2, 3, 9, 12], [1, 4, 5, 6, 7]])


def tensors(dtype=torch.float64, value_size=SIZE, grad=False):
    generator = torch.Generator().manual_seed(3)
    shapes = (HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_size)
    return [
        torch.randn(BATCH, h, LENGTH, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)
        for h, d in shapes
    ]


def causal():
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def rules():
    generator = torch.Generator().manual_seed(4)
    mask = causal()[None, None].repeat(BATCH, 1, 1, 1)
    mask[0, 0, 4:, :2] = False
    added = torch.randn(1, HEADS, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    added = added.masked_fill(~causal(), float("-inf"))
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, :1] = False
    return {
        "causal": ScoreRule(0.4),
        "everything": ScoreRule(0.4, causal=False),
        "window": ScoreRule(0.4, window=3),
        "bool mask": ScoreRule(0.4, causal=False, mask=mask),
        "added mask": ScoreRule(0.4, causal=False, mask=added),
        "softcap": ScoreRule(0.9, softcap=1.5),
        "sinks": ScoreRule(0.4, sinks=torch.linspace(-1, 2, HEADS, dtype=torch.float64)),
        "padding": ScoreRule(0.4, real=real),
        "packed": ScoreRule(0.4, segments=(torch.arange(LENGTH)[None] > 6).long()),
        "softcap and mask": ScoreRule(0.9, softcap=1.5, causal=False, mask=mask),
    }


RULES = rules()


def whole(q, k, v, rule):
    """Softmax of whole score matrices, (B, H, S, S); output, log-sum-exp and probabilities."""
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap:
        s = torch.tanh(s / rule.softcap) * rule.softcap
    i = torch.arange(LENGTH)
    seen = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    if rule.causal:
        seen = seen & (i[:, None] >= i)
    if rule.window:
        seen = seen & (i[:, None] - i < rule.window)
    if rule.real is not None:
        seen = seen & rule.real[:, None, None]
    if rule.segments is not None:
        seen = seen & (rule.segments[:, None, :, None] == rule.segments[:, None, None])
    if rule.mask is not None and rule.mask.dtype == torch.bool:
        seen = seen & rule.mask
    elif rule.mask is not None:
        s = s + rule.mask
    s = s.masked_fill(~seen, float("-inf"))
    if rule.sinks is not None:
        s = torch.cat([s, rule.sinks[None, :, None, None].expand(BATCH, -1, LENGTH, 1)], -1)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])[..., :LENGTH]
    return p @ v, lse, p


def at(x, rows, dim=2):
    index = rows[:, None, :, None] if x.dim() == 4 else rows[:, None]
    return x.gather(dim, index.expand(-1, x.shape[1], *([-1, x.shape[-1]] if x.dim() == 4 else [-1])))


@pytest.fixture(params=["one tile", "tiles of a row"])
def tile(request, monkeypatch):
    if request.param != "one tile":
        monkeypatch.setattr(attention, "_TILE_BYTES", 1)


@pytest.mark.parametrize("name", RULES)
def test_rows_over_all_keys(name, tile):
    q, k, v = tensors()
    rule = RULES[name]
    expected, lse, _ = whole(q, k, v, rule)
    got, got_lse = rows_attention(at(q, KEPT), k, v, rule, KEPT)
    torch.testing.assert_close(got_lse.double(), at(lse, KEPT), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, at(expected, KEPT), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows_log_sum_exp(at(q, KEPT), k, rule, KEPT), at(lse, KEPT), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value_size", [SIZE, 5])
@pytest.mark.parametrize("keys", ["kept", "all"])
@pytest.mark.parametrize("name", RULES)
def test_backward_over_kept_rows(name, keys, value_size, tile):
    """The exact gradient of o[T], every row's softmax being over all keys, with the rest held constant."""
    q, k, v = tensors(value_size=value_size, grad=True)
    rule = RULES[name]
    keep = torch.zeros(BATCH, LENGTH, dtype=torch.bool).scatter_(1, KEPT, True)

    def only_kept(x):
        return torch.where(keep[:, None, :, None], x, x.detach())

    if keys == "all":
        output, lse, _ = whole(q, only_kept(k), only_kept(v), rule)
    else:  # logits towards other keys are constants: add them to the softmax as such
        output, lse, _ = kept_logits(q, k, only_kept(v), rule, keep)
    do = torch.randn(BATCH, HEADS, KEPT.shape[1], value_size, dtype=torch.float64)
    expected = torch.autograd.grad(at(output, KEPT), [q, k, v], do)
    detached = [t.detach() for t in (q, k, v)]
    kept = [at(t, KEPT).requires_grad_() for t in detached]
    constants = detached[1:] if keys == "all" else [None, None]
    o = KeptAttention.apply(*kept, at(output, KEPT).detach(), at(lse, KEPT).detach(), rule, KEPT, *constants)
    assert torch.equal(o, at(output, KEPT))
    got = torch.autograd.grad(o, kept, do)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, at(b, KEPT), rtol=1e-6, atol=1e-7)


def kept_logits(q, k, v, rule, keep):
    """``whole`` in which the logits of keys outside ``keep`` do not depend on q and k."""
    live = whole_scores(q, k, rule)
    dead = whole_scores(q.detach(), k.detach(), rule)
    s = torch.where(keep[:, None, None], live, dead)
    lse = s.logsumexp(-1)
    if rule.sinks is not None:
        lse = torch.logaddexp(lse, rule.sinks[None, :, None])
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return p @ v.repeat_interleave(HEADS // GROUPS, 1), lse, p


def whole_scores(q, k, rule):
    _, lse, p = whole(q, k, torch.zeros_like(k), rule)
    return torch.where(p > 0, p.clamp_min(1e-300).log() + lse.masked_fill(p.sum(-1) == 0, 0.0)[..., None], -torch.inf)


def test_rows_that_see_nothing_give_nothing():
    mask = causal()[None, None].repeat(BATCH, 1, 1, 1)
    mask[0, 0, 3] = False
    rule = ScoreRule(0.4, causal=False, mask=mask)
    q, k, v = tensors()
    rows = torch.tensor([[2, 3, 4], [2, 3, 4]])
    lse = rows_log_sum_exp(at(q, rows), k, rule, rows)
    assert (lse[0, :, 1] == float("-inf")).all() and lse[1].isfinite().all()
    kept = [at(t, rows).requires_grad_() for t in (q, k, v)]
    o = KeptAttention.apply(*kept, at(v, rows).repeat_interleave(2, 1), lse, rule, rows)
    gradients = torch.autograd.grad(o, kept, torch.ones_like(o))
    assert all(g.isfinite().all() for g in gradients) and (gradients[0][0, :, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["causal", "bool mask", "added mask"])
def test_the_flash_kernel_is_the_one_sdpa_uses(kind, dtype):
    """Bit for bit, so that asking it for its log-sum-exp changes no forward pass."""
    q, k, v = tensors(dtype)
    rule = RULES[kind]
    mask = rule.mask if rule.mask is None or rule.mask.dtype == torch.bool else rule.mask.to(dtype)
    output, lse = flash_forward(q, k, v, scale=0.4, causal=rule.causal, mask=mask)
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=rule.causal, scale=0.4)
    assert torch.equal(output, expected)
    assert lse.shape == (BATCH, HEADS, LENGTH) and lse.dtype in (torch.float32, torch.float64)


def test_the_flash_kernel_is_left_alone_where_it_does_not_apply(monkeypatch):
    q, k, v = tensors()
    assert flash_forward(q, k, tensors(value_size=5)[2], scale=1.0, causal=True) is None
    assert flash_forward(q[:, :, :0], k, v, scale=1.0, causal=True) is None
    assert flash_forward(q.to(torch.float32), k, v, scale=1.0, causal=True) is None
    assert flash_forward(q.to("meta"), k.to("meta"), v.to("meta"), scale=1.0, causal=True) is None


@pytest.mark.parametrize("name", ["causal", "bool mask"])
@pytest.mark.parametrize("keys", ["kept", "all"])
def test_without_the_flash_kernel_the_tiles_give_the_same(name, keys, monkeypatch):
    q, k, v = tensors(torch.float32)
    rule = RULES[name]
    results = []
    for available in (True, False):
        if not available:
            monkeypatch.setattr(attention, "_flash_applies", lambda *_: False)
        output, lse = rows_attention(at(q, KEPT), k, v, rule, KEPT)
        kept = [at(t, KEPT).requires_grad_() for t in (q, k, v)]
        constants = (k, v) if keys == "all" else (None, None)
        o = KeptAttention.apply(*kept, output, lse, rule, KEPT, *constants)
        results.append([output, *torch.autograd.grad(o, kept, torch.linspace(-1, 1, o.numel()).view(o.shape))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_half_precision_sums_in_float32():
    q, k, _ = tensors(torch.bfloat16)
    lse = rows_log_sum_exp(at(q, KEPT), k, RULES["causal"], KEPT)
    assert lse.dtype == torch.float32
