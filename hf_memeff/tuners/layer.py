"""The linear layer that the engine uses where a layer's own forward runs: outside structured blocks."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn

from hf_memeff.blocks.linear import plan_linear
from hf_memeff.ops.lora_linear import lora_linear_apply


class MemeffLinear(lora.Linear):
    """PEFT's LoRA linear with a backward that keeps only the input as it came in.

    Saved for backward: ``x`` in its own dtype, which projections that read the same ``x`` share, and the adapter's
    weights. Stock LoRA saves its copy of ``x`` in the adapter's dtype, the dropped-out copy and ``x A^T``. Base layer,
    merging, saving and every PEFT variant are PEFT's own code.
    """

    saves_input_only = True  # read by the status report

    def _get_name(self) -> str:
        return "Linear"  # printed, and reported by PEFT's `get_layer_status`, as the "lora.Linear" that it stands for

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map (..., Din) to (..., Dout) as `peft.tuners.lora.Linear` does; calls with other arguments go its way."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or args or kwargs:
            return super().forward(x, *args, **kwargs)  # under compile, AOTAutograd chooses what is saved
        plan = plan_linear(self)
        if isinstance(plan, str) or not plan.terms:
            return super().forward(x)
        y = self.base_layer(x)
        tensors = plan.tensors()
        for term in plan.terms:
            y = lora_linear_apply(x, y, next(tensors), next(tensors), term.scaling, term.dropout)
        return y


def use_memeff_linears(model: nn.Module) -> None:
    """Give every plain LoRA linear of a model the class `MemeffLinear`; weights, state-dict keys and hooks stay."""
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = MemeffLinear


def use_stock_linears(model: nn.Module) -> None:
    """Undo `use_memeff_linears`."""
    for module in model.modules():
        if type(module) is MemeffLinear:
            module.__class__ = lora.Linear
