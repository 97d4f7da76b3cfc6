"""What ``attach_blocks`` leaves on a model: the options, and a forward on each block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_memeff.blocks.block import BlockForward
from hf_memeff.blocks.options import EngineOptions

OPTIONS = "_hf_memeff_options"


def attached_options(model: nn.Module) -> EngineOptions | None:
    """The options that the engine runs with now, or ``None`` where it is not attached; ``model`` as for
    ``attach_blocks``.
    """
    return model.__dict__.get(OPTIONS)


def attached_forward(layer: nn.Module) -> BlockForward | None:
    """The forward that is attached to a layer, or ``None``."""
    for slot in ("forward", "_old_forward"):
        forward = layer.__dict__.get(slot)
        if isinstance(forward, BlockForward):
            return forward
    return None


def owners(model: nn.Module, layers: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose forward runs some layers: those with a list that holds one of them."""
    wanted = {id(layer) for layer in layers}
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(id(c) in wanted for c in child):
                yield module
                break
