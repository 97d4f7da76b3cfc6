"""Merging into quantised base weights and back, without the rounding that undoing it by arithmetic leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

_REPLACING = frozenset({"bnb", "hqq", "torchao"})
"""Modules of `peft.tuners.lora` whose layers merge by making new quantised tensors; the old ones stay as they are."""

_RECORDS = ("quant_state", "state")
"""What bitsandbytes' 4-bit and 8-bit layers keep of their weight outside of it."""


@dataclass(frozen=True)
class KeptBase:
    """A quantised base layer as it was before a merge, by reference: its tensors are not copied.

    Attributes:
        layer: the module.
        parameters: each parameter with its data and the attributes that its quantiser gave it, by name.
        records: the quantiser's records beside the weight.
    """

    layer: nn.Module
    parameters: dict[str, tuple[nn.Parameter, Tensor, dict[str, Any]]]
    records: dict[str, Any]

    @classmethod
    def of(cls, layer: nn.Module) -> KeptBase:
        parameters = {name: (p, p.data, dict(p.__dict__)) for name, p in layer.named_parameters(recurse=False)}
        records = {name: copy.copy(layer.__dict__[name]) for name in _RECORDS if name in layer.__dict__}
        return cls(layer, parameters, records)

    def restore(self) -> None:
        """Give the layer back what it had."""
        for name, (parameter, data, attributes) in self.parameters.items():
            if type(data) is Tensor:
                parameter.data = data  # PEFT replaces the data of a bias, not the bias
            parameter.__dict__.update(attributes)
            self.layer._parameters[name] = parameter
        self.layer.__dict__.update(self.records)

    def on_one_device_with(self, layer: nn.Module) -> bool:
        """Whether the kept tensors are where the tensors of a layer are."""
        return {p.device for p, _, _ in self.parameters.values()} == {p.device for p in layer.parameters()}


@contextmanager
def kept_quantised_bases(model: nn.Module) -> Iterator[None]:
    """Keep the quantised weights of every layer that is merged meanwhile, so that `unmerge_exactly` can undo it.

    PEFT (0.21) unmerges by subtracting from the dequantised weight and quantising anew, after which the base model is
    another one. Kept are the quantised bytes themselves: while merged, those weights are in memory twice.

    Args:
        model: the base model with its adapters.
    """
    layers: list[Any] = [m for m in model.modules() if _replaces_its_weight(m) and not m.merged]
    for layer in layers:
        layer._before_merge = KeptBase.of(layer.get_base_layer())
    try:
        yield
    finally:
        for layer in layers:
            if not layer.merged:
                del layer._before_merge


def unmerge_exactly(layer: nn.Module) -> bool:
    """Undo the merges of a layer whose quantised weights were kept.

    Args:
        layer: any module.

    Returns:
        Whether it was done. False where nothing was kept, or where the model has been moved to another device since;
        PEFT's own way is open then.
    """
    kept: KeptBase | None = layer.__dict__.pop("_before_merge", None)
    if kept is None or not layer.merged or not kept.on_one_device_with(layer.get_base_layer()):
        return False
    kept.restore()
    layer.base_layer = kept.layer
    layer.merged_adapters.clear()
    return True


def check_biases_can_merge(model: nn.Module) -> None:
    """Refuse to merge the bias of a LoRA factor into a bitsandbytes layer: PEFT (0.21.2) leaves out alpha / r there.

    Args:
        model: the base model with its adapters.

    Raises:
        ValueError: such a layer has an adapter with `lora_bias` and another scaling than 1.
    """
    for name, layer in model.named_modules():
        if not (isinstance(layer, LoraLayer) and type(layer).__module__.endswith(".bnb")):
            continue
        for adapter, has_bias in layer.lora_bias.items():
            if has_bias and layer.scaling[adapter] != 1:
                raise ValueError(
                    f"got {name!r} to merge, a {type(layer.get_base_layer()).__name__} whose adapter {adapter!r} has "
                    f"lora_bias and a scaling of {layer.scaling[adapter]:g}, expected a scaling of 1: PEFT would merge "
                    "the bias without it (huggingface/peft#3741). Fix: load the base model unquantised and merge "
                    "there, or keep the adapter apart."
                )


def _replaces_its_weight(module: nn.Module) -> bool:
    package, _, name = type(module).__module__.rpartition(".")
    return package == "peft.tuners.lora" and name in _REPLACING and isinstance(module, LoraLayer)
