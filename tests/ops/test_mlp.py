"""Gated and plain MLP: gradcheck over activations, tiles and every pattern of adapters and wanted gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blocks._tolerances import LORA_ROUNDING_FACTOR, ORDER_OF_SUMS, relative_error
from hf_memeff.memory import saved_tensor_bytes
from hf_memeff.ops.activations import SILU
from hf_memeff.ops.lora_linear import LinearOp
from hf_memeff.ops.mlp import Adapter, MlpOp, Projection, gated_mlp, plain_mlp

N, D, INNER, R = 3, 3, 5, 2
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "other": F.mish,
}
EXACT64 = ORDER_OF_SUMS[torch.float64]


def build(gated, dtype=torch.float64, biased=True, rows=(N,), width=D, inner=INNER):
    """x, then (A, Bm) of each projection; and a function of them to the projections."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).div(width**0.5).to(dtype)

    widths = ([(inner, width)] if gated else []) + [(inner, width), (width, inner)]
    frozen = [(random(o, i), random(o) if biased else None) for o, i in widths]
    factors = [t for o, i in widths for t in (random(R, i), random(o, R))]

    def projections(adapters):
        return [
            Projection(w, b, Adapter(*adapters[2 * k : 2 * k + 2], 0.5 + k) if adapters[2 * k] is not None else None)
            for k, (w, b) in enumerate(frozen)
        ]

    return random(*rows, width), factors, projections


def reference(x, projections, act):
    """The MLP by autograd."""

    def linear(p, t):
        y = F.linear(t, p.weight, p.bias)
        return y if p.adapter is None else y + p.adapter.scaling * t @ p.adapter.a.t() @ p.adapter.b.t()

    *first, down = projections
    if len(first) == 2:
        return linear(down, act(linear(first[0], x)) * linear(first[1], x))
    return linear(down, act(linear(first[0], x)))


def ours(x, projections, act, tile):
    return (gated_mlp if len(projections) == 3 else plain_mlp)(x, *projections, act, tile)


@pytest.mark.parametrize("tile", [1, 2, 100])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck(gated, act, tile):
    x, factors, projections = build(gated)
    leaves = [t.requires_grad_() for t in (x, *factors)]
    assert torch.autograd.gradcheck(lambda x, *f: ours(x, projections(f), ACTIVATIONS[act], tile), leaves)


@pytest.mark.parametrize("gated", [True, False])
def test_c03_gradcheck_of_every_requires_grad_pattern(gated):
    act = F.silu if gated else F.gelu
    x, factors, projections = build(gated)

    def function(x, *factors):
        return ours(x, projections(factors), act, 2)

    for wanted in itertools.product([False, True], repeat=1 + len(factors)):
        leaves = [t.clone().requires_grad_(want) for t, want in zip((x, *factors), wanted, strict=True)]
        if any(wanted):
            assert torch.autograd.gradcheck(function, leaves, fast_mode=True), wanted
        else:
            assert not function(*leaves).requires_grad


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_adapters_on_any_subset_of_the_projections(gated, biased):
    count = 3 if gated else 2
    for present in itertools.product([False, True], repeat=count):
        x, factors, projections = build(gated, biased=biased, rows=(2, 5))
        factors = [f if present[k // 2] else None for k, f in enumerate(factors)]
        leaves = [t.requires_grad_() for t in (x, *factors) if t is not None]
        expected = reference(x, projections(factors), F.silu)
        got = ours(x, projections(factors), F.silu, 3)
        assert got.shape == x.shape
        assert relative_error(got, expected) <= EXACT64
        g = torch.randn_like(expected)
        for a, b in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True):
            assert relative_error(a, b) <= EXACT64, present


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_half_precision_rounds_no_more_than_autograd(act, dtype):
    """Both against float64, on average over the output and all gradients."""
    x, factors, projections = build(True, dtype=dtype, rows=(65,), width=63, inner=111)

    def run(function, kind, *tile):
        leaves = [t.to(kind).requires_grad_() for t in (x, *factors)]
        frozen = [Projection(p.weight.to(kind), p.bias.to(kind), p.adapter) for p in projections(leaves[1:])]
        y = function(leaves[0], frozen, ACTIVATIONS[act], *tile)
        return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view(y.shape).to(kind))]

    exact, stock, got = run(reference, torch.float64), run(reference, dtype), run(ours, dtype, 17)
    assert all(t.dtype == dtype for t in got)
    errors = [sum(relative_error(t, e) for t, e in zip(found, exact, strict=True)) for found in (stock, got)]
    assert errors[1] <= LORA_ROUNDING_FACTOR * errors[0]


def test_fused_gate_and_up_is_the_gated_mlp():
    """Phi-3 computes gate and up by one projection, gate first."""
    x, _, projections = build(True, rows=(4,))
    gate, up, down = projections([None] * 6)
    g = torch.randn(4, D, dtype=torch.float64)
    fused = LinearOp(torch.cat((gate.weight, up.weight)), torch.cat((gate.bias, up.bias)))
    op = MlpOp(None, fused, LinearOp(down.weight, down.bias), SILU, fused=True)
    leaf = x.clone().requires_grad_()
    expected = reference(leaf, (gate, up, down), F.silu)
    assert relative_error(op.forward(x), expected) <= EXACT64
    assert relative_error(op.backward(g, x), torch.autograd.grad(expected, leaf, g)[0]) <= EXACT64


@pytest.mark.parametrize("gated", [True, False])
def test_a_norm_behind_the_mlp_gets_the_output_and_hands_back_its_gradient(gated):
    """``through`` is how a post-norm is differentiated; without one, down is never re-run."""
    x, factors, projections = build(gated, rows=(4,))
    plain = projections([None] * len(factors))
    g = torch.randn(4, D, dtype=torch.float64)
    calls = []
    down = plain[-1]

    def counted(t):
        calls.append(t)
        return F.linear(t, down.weight, down.bias)

    linears = [LinearOp(p.weight, p.bias) for p in plain[:-1]]
    op = MlpOp(linears[0] if gated else None, linears[-1], LinearOp(None, call=counted), SILU)
    leaf = x.clone().requires_grad_()
    expected = reference(leaf, plain, F.silu).pow(3)
    dx = op.backward(g, x, through=lambda dy, y: dy * 3 * y.square())
    assert relative_error(dx, torch.autograd.grad(expected, leaf, g)[0]) <= EXACT64
    assert len(calls) == 2  # for its output and, as a black box, for its gradient
    calls.clear()
    op.backward(g, x)
    assert len(calls) == 1


@pytest.mark.parametrize("gated", [True, False])
def test_c33_no_rows(gated):
    x, factors, projections = build(gated, rows=(2, 0))
    leaves = [t.requires_grad_() for t in (x, *factors)]
    y = ours(x, projections(factors), F.silu, 2)
    assert y.shape == (2, 0, D)
    for gradient, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


@pytest.mark.parametrize("gated", [True, False])
def test_c15_nothing_but_the_input_is_saved(gated):
    x, factors, projections = build(gated, dtype=torch.bfloat16, rows=(300,))
    factors = [nn.Parameter(f) for f in factors]
    made = projections(factors)
    frozen = [t for p in made for t in (p.weight, p.bias)]
    x.requires_grad_()
    assert saved_tensor_bytes(lambda: ours(x, made, F.silu, 16), exclude=frozen) == x.nbytes
    assert saved_tensor_bytes(lambda: reference(x, made, F.silu), exclude=frozen) > 3 * x.nbytes


def test_double_backward_raises_and_says_so():
    x, factors, projections = build(True)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(ours(x, projections(factors), F.silu, 2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("gated", [True, False])
def test_bad_input_is_refused(gated):
    x, factors, projections = build(gated)
    made = projections(factors)
    for tile in (0, -3):
        with pytest.raises(ValueError, match=rf"got tile_tokens={tile}, expected a number of rows >= 1"):
            ours(x, made, F.silu, tile)
    for k in range(len(made)):
        trained = list(made)
        trained[k] = Projection(made[k].weight.clone().requires_grad_(), made[k].bias, made[k].adapter)
        with pytest.raises(ValueError, match=r"wants a gradient, expected frozen ones.* Use plain autograd"):
            ours(x, trained, F.silu, 2)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [True, False])
def test_no_uninitialised_memory_leaks(gated):
    x, factors, projections = build(gated, rows=(7,))
    leaves = [t.requires_grad_() for t in (x, *factors)]
    y = ours(x, projections(factors), F.silu, 3)
    assert all(t.isfinite().all() for t in (y, *torch.autograd.grad(y.sum(), leaves)))
