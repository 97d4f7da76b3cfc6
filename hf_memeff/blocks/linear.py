"""What one projection of a block is made of: its base layer, its active adapters, and how its weights may be read.

PEFT's layers are recognised by their attributes, so that the engine needs no import of PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memeff.ops.dropout import DropMask, draw_mask
from hf_memeff.ops.lora_linear import LinearOp, LoraTerm, branch_dtype
from hf_memeff.ops.precision import autocast_dtype


class WeightLinear(nn.Linear):
    """An adapter factor that hands out its weight through a module call.

    FSDP and ZeRO-3 gather a sharded weight only inside the call of the module that owns it; reading ``.weight`` from
    outside sees a shard. State-dict keys are those of ``nn.Linear``.
    """

    def forward(self, input: Tensor | None = None) -> Tensor:
        """Return a copy of the weight (``input`` is ``None``), or the linear map of ``input``."""
        return self.weight.clone() if input is None else F.linear(input, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TermPlan:
    """One active adapter of a projection."""

    adapter: str
    lora_a: Any
    lora_b: Any
    scaling: float
    dropout: nn.Module


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How a projection is computed during one call.

    Attributes:
        base: the frozen layer.
        direct: whether its weight is read, or the layer is called (``reason`` says why).
        transposed: whether the weight is stored (Din, Dout), as GPT-2's Conv1D does.
        terms: active adapters in PEFT's order.
        reason: empty for a direct layer.
    """

    base: Any
    direct: bool
    transposed: bool = False
    terms: tuple[TermPlan, ...] = field(default=())
    reason: str = ""

    def tensors(self) -> Iterator[Tensor]:
        """The adapter tensors that enter the autograd Function: A and Bm of each term."""
        for term in self.terms:
            yield _fetch(term.lora_a)
            yield _fetch(term.lora_b)

    def draw_masks(self, rows: int, device: torch.device) -> list[DropMask | None]:
        """Draw each term's dropout mask whole, in PEFT's order."""
        return [draw_mask(t.dropout, rows, t.lora_a.in_features, t.lora_a.weight.dtype, device) for t in self.terms]

    def build(
        self,
        tensors: Iterator[Tensor],
        masks: Sequence[DropMask | None],
        device_type: str,
        needs: Iterator[bool] | None = None,
    ) -> LinearOp:
        """Make the op for one pass from the adapter tensors; ``needs`` (backward) says which want a gradient."""
        terms = []
        for term, mask in zip(self.terms, masks, strict=True):
            a, b = next(tensors), next(tensors)
            wanted = (False, False) if needs is None else (next(needs), next(needs))
            terms.append(LoraTerm.make(a, b, term.scaling, mask, branch_dtype(a, device_type), wanted))
        if not self.direct:
            return LinearOp(None, call=self.base, terms=terms)
        weight, bias = self.base.weight, self.base.bias
        dtype = autocast_dtype(device_type) or weight.dtype
        weight = weight.to(dtype)
        return LinearOp(
            weight.t() if self.transposed else weight, bias.to(dtype) if bias is not None else None, terms=terms
        )


def plan_linear(module: Any) -> LinearPlan | str:
    """Say how a projection can be computed outside its own forward, or why it cannot.

    Args:
        module: a PEFT LoRA layer, a linear layer, or anything else that maps (N, Din) to (N, Dout).

    Returns:
        The plan, or a reason: a PEFT variant with a forward of its own, hooks that a hand-written pass would skip,
        trained base weights.
    """
    if _has_hooks(module):
        return "it has forward hooks, which a structured pass would skip"
    if not hasattr(module, "base_layer"):
        return _plan_base(module, ())
    if not hasattr(module, "lora_A"):
        return f"{type(module).__name__} has a forward of its own"
    if module.merged:
        return (
            "merged adapters with adapters disabled" if module.disable_adapters else _plan_base(module.base_layer, ())
        )
    terms = []
    if not module.disable_adapters:
        for adapter in module.active_adapters:
            if adapter not in module.lora_A:
                continue
            problem = _unstructured_adapter(module, adapter)
            if problem:
                return problem
            terms.append(
                TermPlan(
                    adapter,
                    module.lora_A[adapter],
                    module.lora_B[adapter],
                    float(module.scaling[adapter]),
                    module.lora_dropout[adapter],
                )
            )
    if any(_has_hooks(m) for t in terms for m in (t.lora_a, t.lora_b, t.dropout)):
        return "its adapter has forward hooks, which a structured pass would skip"
    if any("forward" in m.__dict__ for t in terms for m in (t.lora_a, t.lora_b)):
        return "its adapter's forward was replaced (offloading hooks)"
    return _plan_base(module.base_layer, tuple(terms))


def _unstructured_adapter(module: Any, adapter: str) -> str:
    """Why an adapter runs through PEFT's own forward, or an empty string."""
    variant = getattr(module, "lora_variant", {}).get(adapter)
    if variant is not None:
        return f"{type(variant).__name__.removesuffix('LinearVariant')} runs through PEFT's own forward"
    if getattr(module, "lora_bias", {}).get(adapter):
        return "lora_bias runs through PEFT's own forward"
    if not isinstance(module.lora_A[adapter], nn.Linear) or not isinstance(module.lora_B[adapter], nn.Linear):
        return f"its factors are {type(module.lora_A[adapter]).__name__}, not linear layers"
    if type(module.lora_dropout[adapter]) not in (nn.Identity, nn.Dropout):
        return f"its dropout is {type(module.lora_dropout[adapter]).__name__}"
    return ""


def _plan_base(base: Any, terms: tuple[TermPlan, ...]) -> LinearPlan | str:
    if _has_hooks(base):
        return "its base layer has forward hooks, which a structured pass would skip"
    if any(p.requires_grad for p in base.parameters(recurse=type(base) is not nn.Linear)):
        return "its base weights are trained"
    transposed = type(base).__name__ == "Conv1D" and hasattr(base, "nf")
    if type(base) is not nn.Linear and not transposed:
        return LinearPlan(base, False, terms=terms, reason=f"{type(base).__name__} is used through its own forward")
    if "forward" in base.__dict__:
        return LinearPlan(base, False, terms=terms, reason="its forward was replaced and is called as it is")
    weight = base.weight
    if type(weight) not in (nn.Parameter, Tensor) or type(weight.data) is not Tensor or hasattr(weight, "ds_id"):
        kind = type(weight.data).__name__
        reason = f"its weight ({kind}) is sharded or quantised and is used through its own forward"
        return LinearPlan(base, False, terms=terms, reason=reason)
    return LinearPlan(base, True, transposed, terms)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _fetch(linear: Any) -> Tensor:
    """An adapter factor's weight: read where it is whole, through the module's call where FSDP or ZeRO-3 shards it."""
    weight = linear.weight
    if type(linear) in (WeightLinear, nn.Linear) and not hasattr(weight, "ds_id") and type(weight.data) is Tensor:
        return weight
    return linear(None)
