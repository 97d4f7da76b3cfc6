"""Which tensors a training run is meant to change, by module and adapter, and what gradients they get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class TrainedTensor:
    """A parameter that is trained.

    Attributes:
        module: name of the adapted module in the base model, such as "model.layers.0.self_attn.q_proj".
        adapter: name of the adapter it belongs to; "" for a parameter of the base model.
        name: what it is within the module, such as "lora_A".
        parameter: the tensor.
    """

    module: str
    adapter: str
    name: str
    parameter: nn.Parameter

    @property
    def place(self) -> str:
        """Module and adapter, for messages."""
        return f"{self.module} ({self.adapter})" if self.adapter else f"{self.module}.{self.name}".lstrip(".")


def trained_tensors(model: nn.Module) -> list[TrainedTensor]:
    """Parameters that require a gradient and take part in the forward pass as adapters stand now.

    Those of frozen, inactive and disabled adapters are left out; a parameter that several modules share comes once.

    Args:
        model: any model, with adapters of PEFT or without.
    """
    found: dict[nn.Parameter, TrainedTensor] = {}
    of_adapters: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            place = name.removeprefix(_PEFT_PREFIX)
            active = () if module.disable_adapters else tuple(module.active_adapters)
            for adapter, label, parameter in _adapter_tensors(module):
                of_adapters.add(parameter)
                if adapter in active:
                    found.setdefault(parameter, TrainedTensor(place, adapter, label, parameter))
    for name, parameter in model.named_parameters():
        if parameter not in of_adapters:
            place, _, label = name.removeprefix(_PEFT_PREFIX).rpartition(".")
            found.setdefault(parameter, TrainedTensor(place, "", label, parameter))
    return [tensor for tensor in found.values() if tensor.parameter.requires_grad]


def _adapter_tensors(layer: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Adapter, label and parameter of all adapter tensors that a layer holds itself."""
    for attribute in layer.adapter_layer_names:
        held = getattr(layer, attribute, None)  # a dotted name is another layer's, which is visited on its own
        for adapter, item in held.items() if isinstance(held, (nn.ModuleDict, nn.ParameterDict)) else ():
            if isinstance(item, nn.Parameter):
                yield adapter, attribute, item
                continue
            for name, parameter in item.named_parameters():
                yield adapter, attribute if name == "weight" else f"{attribute}.{name}", parameter


class GradientWatch:
    """The largest absolute value of each watched gradient since the last restart, measured as backward makes it."""

    def __init__(self) -> None:
        self.watched: list[TrainedTensor] = []
        self._hooks: list[RemovableHandle] = []
        self._step: dict[nn.Parameter, Tensor] = {}  # in the order in which backward reached the parameters
        self._largest: dict[nn.Parameter, float] = {}

    def watch(self, tensors: list[TrainedTensor]) -> None:
        """Watch these; nothing happens if they are watched already."""
        if [id(tensor.parameter) for tensor in tensors] == [id(tensor.parameter) for tensor in self.watched]:
            return
        for hook in self._hooks:
            hook.remove()
        self.watched = tensors
        self._hooks = [t.parameter.register_post_accumulate_grad_hook(self._note) for t in tensors]

    def end_step(self) -> list[TrainedTensor]:
        """Take in what the step's micro-batches brought.

        Returns:
            The tensors whose gradient is not finite, those that backward reached first in front.
        """
        by_parameter = {tensor.parameter: tensor for tensor in self.watched}
        not_finite = []
        for parameter, size in zip(self._step, floats(self._step.values()), strict=True):
            if not math.isfinite(size):
                not_finite.append(by_parameter[parameter])
                size = math.inf  # max() would take NaN or leave it, by its place
            self._largest[parameter] = max(size, self._largest.get(parameter, 0.0))
        self._step = {}
        return not_finite

    def without(self) -> set[TrainedTensor]:
        """Watched tensors whose gradient was missing or zero in all steps since the last restart."""
        return {tensor for tensor in self.watched if not self._largest.get(tensor.parameter)}

    def restart(self) -> None:
        """Forget what was measured."""
        self._step, self._largest = {}, {}

    def clear(self) -> None:
        """Watch nothing."""
        self.watch([])
        self.restart()

    def _note(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and parameter.numel():
            size = torch.linalg.vector_norm(parameter.grad.detach(), math.inf)
            earlier = self._step.get(parameter)
            # maximum() hands NaN on, so that a bad micro-batch is not forgotten
            self._step[parameter] = size if earlier is None else torch.maximum(earlier, size)


def largest_values(tensors: Iterable[Tensor]) -> list[float]:
    """The largest absolute value of each tensor; 0 for one without elements."""
    zero = torch.zeros(())
    return floats(torch.linalg.vector_norm(t.detach(), math.inf) if t.numel() else zero for t in tensors)


def floats(scalars: Iterable[Tensor]) -> list[float]:
    """Values of tensors of one element, read with one synchronisation per device."""
    values = list(scalars)
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    found = [0.0] * len(values)
    for indices in by_device.values():
        numbers = torch.stack([values[index].float() for index in indices]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            found[index] = number
    return found
