"""Activations are recognised by what they compute, and differentiated as autograd does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from blocks._tolerances import ORDER_OF_SUMS, relative_error
from hf_memeff.ops.activations import GELU, GELU_TANH, SILU, identify_activation

KNOWN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "other",
    "relu": "other",
    "relu2": "other",
    "mish": "other",
    "tanh": "other",
}


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_activations_are_recognised_by_value(name):
    assert identify_activation(ACT2FN[name]).name == KNOWN[name]


def test_a_renamed_or_wrapped_activation_is_recognised_and_a_misnamed_one_is_not():
    class Renamed(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    def silu(x):  # the name lies
        return x * torch.sigmoid(1.02 * x)

    assert identify_activation(Renamed()) is SILU
    assert identify_activation(silu).name == "other"


def test_something_that_changes_the_shape_is_not_taken_for_an_activation():
    assert identify_activation(lambda x: F.silu(x)[None]).name == "other"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH, identify_activation(F.mish)], ids=lambda a: a.name)
def test_backward_is_autograd_s(activation, dtype):
    x, g = (torch.randn(5, 9, dtype=torch.float64).to(dtype) for _ in range(2))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(activation.forward(leaf), leaf, g)
    with torch.no_grad():
        got = activation.backward_(g.clone(), x)
    assert got.dtype == dtype
    assert relative_error(got, expected) <= ORDER_OF_SUMS[torch.float64]  # the kernels are autograd's own


def test_forward_leaves_its_input_alone():
    x = torch.randn(5)
    before = x.clone()
    for activation in (SILU, GELU, GELU_TANH):
        assert activation.forward(x).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
