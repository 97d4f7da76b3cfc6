"""RMSNorm in all conventions and LayerNorm: gradcheck, the models' own modules, dtypes, saved bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from blocks._tolerances import ORDER_OF_SUMS, relative_error
from hf_memeff.memory import saved_tensor_bytes
from hf_memeff.ops.norms import NormOp, layer_norm, rms_norm

D = 7
SHAPES = [(3, D), (2, 1, D), (D,), (4, 1)]
CONVENTIONS = [{"offset": o, "round_first": f} for o, f in ((0.0, True), (0.0, False), (1.0, False))]
MODULES = {LlamaRMSNorm: CONVENTIONS[0], Olmo2RMSNorm: CONVENTIONS[1], Gemma2RMSNorm: CONVENTIONS[2]}


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rms_norm_gradcheck(convention, weighted, shape):
    weight = random(shape[-1]) if weighted else None
    x = random(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: rms_norm(t, weight, 1e-3, **convention), x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weighted", "biased"), list(itertools.product([False, True], repeat=2)))
def test_layer_norm_gradcheck_and_values(weighted, biased, shape):
    weight, bias = (random(shape[-1]) if given else None for given in (weighted, biased))
    x = random(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: layer_norm(t, weight, bias, 1e-3), x)
    expected = F.layer_norm(x, shape[-1:], weight, bias, 1e-3)
    assert relative_error(layer_norm(x, weight, bias, 1e-3), expected) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rms_norm_is_the_formula(convention):
    x, weight = random(3, 5, D), random(D)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (convention["offset"] + weight)
    assert relative_error(rms_norm(x, weight, 1e-3, **convention), expected) <= ORDER_OF_SUMS[torch.float64]


def module_result(norm, x, g):
    x = x.clone().requires_grad_()
    y = norm(x)
    return y.detach(), torch.autograd.grad(y, x, g)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", MODULES)
def test_values_and_gradients_are_the_models_own(module, dtype):
    norm = module(65, eps=1e-6).to(dtype).requires_grad_(False)
    norm.weight.copy_(random(65, dtype=dtype))
    x, g = random(2, 33, 65, dtype=dtype), random(2, 33, 65, dtype=dtype)
    y, dx = module_result(norm, x, g)
    got_y, got_dx = module_result(lambda t: rms_norm(t, norm.weight, 1e-6, **MODULES[module]), x, g)
    assert got_y.dtype == y.dtype and got_dx.dtype == dx.dtype
    assert relative_error(got_y, y) <= ORDER_OF_SUMS[torch.float32]  # rounded at the same places
    assert relative_error(got_dx, dx) <= ORDER_OF_SUMS[dtype]
    wrong = [c for c in CONVENTIONS if c != MODULES[module]]
    if dtype == torch.bfloat16:  # there the conventions differ, so that the comparison above could have failed
        for other in wrong:
            assert relative_error(rms_norm(x, norm.weight, 1e-6, **other), y) > ORDER_OF_SUMS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_in_half_precision(dtype):
    weight, bias, x, g = (random(*s, dtype=dtype) for s in ((65,), (65,), (9, 65), (9, 65)))
    for got, expected in zip(
        module_result(lambda t: layer_norm(t, weight, bias, 1e-5), x, g),
        module_result(lambda t: F.layer_norm(t, (65,), weight, bias, 1e-5), x, g),
        strict=True,
    ):
        assert got.dtype == dtype
        assert relative_error(got, expected) <= ORDER_OF_SUMS[dtype]


@pytest.mark.parametrize("module", MODULES)
def test_float32_statistics_repeat_the_models_float64_result_to_the_last_bits(module):
    """transformers' RMSNorms compute in float32 whatever the input: in float64 that rounding is part of the model."""
    norm = module(65, eps=1e-6).double().requires_grad_(False)
    norm.weight.copy_(random(65))
    x, g = random(9, 65), random(9, 65)
    op = NormOp("rms", norm.weight, None, 1e-6, float32_statistics=True, **MODULES[module])
    y, dx = module_result(norm, x, g)
    assert relative_error(op.forward(x), y) <= 1e-15
    assert relative_error(op.backward(g, x), dx) <= 1e-15
    wide = NormOp("rms", norm.weight, None, 1e-6, **MODULES[module])
    assert 1e-9 < relative_error(wide.forward(x), y) < 1e-6  # without it, float32's rounding shows


def test_float16_rows_whose_squares_overflow():
    x = torch.full((2, D), 300.0, dtype=torch.float16)  # 300^2 > 65,504
    y = rms_norm(x, torch.ones(D, dtype=torch.float16), 1e-6)
    assert torch.equal(y, torch.ones_like(x))
    leaf = x.clone().requires_grad_()
    rms_norm(leaf, torch.ones(D, dtype=torch.float16), 1e-6).backward(random(2, D, dtype=torch.float16))
    assert leaf.grad.isfinite().all()


def test_c33_no_rows():
    x = torch.zeros(0, D, requires_grad=True)
    rms_norm(x, torch.ones(D), 1e-6).sum().backward()
    assert x.grad.shape == (0, D)
    layer_norm(x, torch.ones(D), torch.ones(D), 1e-6).sum().backward()
    assert x.grad.shape == (0, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c15_nothing_but_the_input_is_saved(dtype):
    weight = nn.Parameter(random(D, dtype=dtype), requires_grad=False)
    x = random(300, D, dtype=dtype).requires_grad_()
    assert saved_tensor_bytes(lambda: rms_norm(x, weight, 1e-6), exclude=[weight]) == x.nbytes
    assert saved_tensor_bytes(lambda: layer_norm(x, weight, weight, 1e-6), exclude=[weight]) == x.nbytes
    stock = LlamaRMSNorm(D).to(dtype)
    assert saved_tensor_bytes(lambda: stock(x)) > x.nbytes


def test_an_input_without_gradient_gives_an_output_without():
    assert not rms_norm(torch.ones(2, D), torch.ones(D), 1e-6).requires_grad


def test_double_backward_raises_and_says_so():
    x = random(3, D).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x, None, 1e-3).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_trainable_weight_is_refused():
    trained = torch.ones(D, requires_grad=True)
    for call in (
        lambda: rms_norm(torch.ones(2, D), trained, 1e-6),
        lambda: layer_norm(torch.ones(2, D), trained, None, 1e-6),
        lambda: layer_norm(torch.ones(2, D), None, trained, 1e-6),
    ):
        with pytest.raises(ValueError, match=r"got .*requires_grad=True, expected a frozen one.* Use torch"):
            call()


@pytest.mark.usefixtures("poisoned")
def test_no_uninitialised_memory_leaks():
    x, g = random(3, D), random(3, D)
    weight = random(D)
    for norm in (lambda t: rms_norm(t, weight, 1e-6), lambda t: layer_norm(t, weight, None, 1e-6)):
        assert all(t.isfinite().all() for t in module_result(norm, x, g))
