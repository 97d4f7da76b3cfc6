"""What a layer is made of at the moment of a call, and whether it may be run twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_memeff.blocks.arguments import filled_cache


@dataclass(slots=True)
class Survey:
    """What one walk over a layer's modules finds; a call asks for it every time, so it is one walk without names.

    Attributes:
        adapted: PEFT's LoRA layers.
        trained: modules with a parameter that wants a gradient, and the parameter's name.
        managed: a module below the layer that accelerate's hooks manage, or ``None``.
    """

    adapted: list[Any]
    trained: list[tuple[nn.Module, str]]
    managed: nn.Module | None

    @staticmethod
    def of(layer: nn.Module) -> Survey:
        found = Survey([], [], None)
        for module in layer.modules():
            fields = module.__dict__
            if "lora_A" in fields["_modules"]:
                found.adapted.append(module)
            for name, parameter in fields["_parameters"].items():
                if parameter is not None and parameter.requires_grad:
                    found.trained.append((module, name))
            if "_hf_hook" in fields and module is not layer:
                found.managed = module
        return found

    def _trained_besides_adapters(self) -> bool:
        """Whether a weight wants a gradient that is no adapter's (a merged adapter's factors keep asking for one)."""
        factors = {f for m in self.adapted for d in (m.lora_A, m.lora_B) for f in d.modules()}
        return any(module not in factors for module, _ in self.trained)

    def unreplayable(self, layer: nn.Module, others: dict[str, Any] | None, hidden: Tensor | None) -> str:
        """Why the block must not or need not be run twice, or an empty string."""
        idle = bool(self.adapted)
        active = False
        for module in self.adapted:
            # PEFT hands per-call arguments (adapter_names, aLoRA offsets) to layers by temporary pre-hooks
            if module._forward_pre_hooks:
                return f"{name_of(layer, module)}: per-call arguments arrive through hooks that a re-run would not see"
            for adapter in module.active_adapters:
                if adapter not in module.lora_A:
                    continue
                active = active or not (module.disable_adapters or module.merged)
                idle = idle and not active
                kind = type(module.lora_variant.get(adapter)).__name__
                if kind.startswith("ALora"):
                    return f"{name_of(layer, module)}: aLoRA gets its offsets through hooks that a re-run would not see"
                if kind.startswith("Monteclora"):
                    return f"{name_of(layer, module)}: MonteCLoRA draws a sample in each call, a re-run another one"
        if getattr(getattr(layer, "_hf_hook", None), "offload", False):
            return "a hook around the block offloads its weights, which a re-run would not bring back"
        if idle and not self._trained_besides_adapters():
            return "its adapters are disabled or merged"
        if hidden is not None and not (active or self.trained or hidden.requires_grad):
            return "nothing in this block or before it wants a gradient"
        if others is not None:
            if filled_cache(others):
                return "a filled key-value cache is passed, to which a re-run would append"
            configs = [getattr(module, "config", None) for module in (layer, *layer.children())]
            if others.get("output_attentions") or any(getattr(c, "output_attentions", False) for c in configs):
                return "attention weights are asked for"
        return ""


def name_of(layer: nn.Module, module: nn.Module) -> str:
    """The name of a module below a layer, as a message shows it."""
    return next((name for name, m in layer.named_modules() if m is module), type(module).__name__)
