"""One observed forward pass of a model, after which everything is as before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.integrations.anchor.calls import AttentionCall
from hf_memeff.integrations.anchor.settings import LayerState, observed


def run_observed(
    model: nn.Module, input_ids: Tensor, observer: Callable[[AttentionCall, LayerState], None], **changes: Any
) -> None:
    """Run a text through a model under "anchor", in eval mode, densely, and show an observer what would be sparse.

    Args:
        model: a transformers model, wrapped by PEFT or not.
        input_ids: (B, N), no padding.
        observer: called with each call that would be sparse.
        changes: settings to change for it.
    """
    training = [module for module in model.modules() if module.training]
    before = _implementations(model.config)
    model.set_attn_implementation("anchor")
    model.eval()
    arguments: dict[str, Any] = {"input_ids": input_ids.to(next(model.parameters()).device), "use_cache": False}
    if "logits_to_keep" in inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters:
        arguments["logits_to_keep"] = 1
    try:
        with observed(model, observer, **changes), torch.no_grad():
            model(**arguments)
    finally:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True


def _implementations(config: Any) -> dict[str, Any]:
    """The attention implementations of a model and its sub-models, as ``set_attn_implementation`` takes them back."""
    found: dict[str, Any] = {"": config._attn_implementation}
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            found[name] = _implementations(getattr(config, name))
    return found
