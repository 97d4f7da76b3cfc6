"""Activations of the MLP with their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """An elementwise function and its vector-Jacobian product.

    Attributes:
        name: ``silu``, ``gelu``, ``gelu_tanh`` or ``other``.
        forward: ``x -> act(x)`` in a new tensor.
        backward_: ``(g, x) -> g * act'(x)``, written over ``g`` where the kernel allows it.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    backward_: Callable[[Tensor, Tensor], Tensor]


# The fused backward kernels are the ones autograd itself runs for these activations: one pass over memory, internal
# math in float32, hence bit-equal to LoRA's derivative. The written-out formulas would take six passes over the widest
# tensor of the block.
def _silu_backward_(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward.grad_input(g, x, grad_input=g)


def _gelu_backward_(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward.grad_input(g, x, approximate="none", grad_input=g)


def _gelu_tanh_backward_(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward.grad_input(g, x, approximate="tanh", grad_input=g)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


SILU = Activation("silu", F.silu, _silu_backward_)
GELU = Activation("gelu", F.gelu, _gelu_backward_)
GELU_TANH = Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_backward_)


def identify_activation(function: Callable[[Tensor], Tensor]) -> Activation:
    """Find the hand-derived twin of an activation by its values, not by its name.

    A model's activation can be a module, a function or a Hub kernel with any name; what matters is what it computes. It
    is compared with the known ones on a grid of 193 points in [-12, 12] (float32, 1e-6); anything else is
    differentiated by autograd, tile by tile.

    Args:
        function: elementwise, shape preserving.

    Returns:
        ``SILU``, ``GELU``, ``GELU_TANH`` or an ``Activation`` named ``other``.
    """
    grid = torch.linspace(-12.0, 12.0, 193)
    with torch.no_grad():
        values = function(grid)
    for known in (SILU, GELU, GELU_TANH):
        if values.shape == grid.shape and torch.allclose(values, known.forward(grid), rtol=1e-6, atol=1e-6):
            return known

    def backward(g: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf, g)[0]

    return Activation("other", function, backward)
