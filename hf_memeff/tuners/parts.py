"""Find the model that carries the adapters inside what PEFT and trainers put around it."""

from __future__ import annotations

from peft import PeftModel
from torch import nn

from hf_memeff.tuners.model import MemeffModel

_WRAPPERS = {
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Wrappers that trainers put around a model, and where they keep it."""


def model_parts(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The model that carries the adapters, and PEFT's tuner around it, if there is one.

    Args:
        model: a `PeftModel`, a tuner, a model with injected adapters, or one of these inside a trainer's wrappers.
    """
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    if isinstance(model, PeftModel):
        return model.get_base_model(), model.base_model
    if isinstance(model, MemeffModel):
        return model.model, model
    return model, None
