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

    Raises:
        ValueError: not a batch of token ids.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or 0 in input_ids.shape:
        got = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(
            f"got input_ids {got}, expected a tensor of token ids, (batch, tokens). "
            'Fix: input_ids=tokenizer(text, return_tensors="pt").input_ids.'
        )
    training = [module for module in model.modules() if module.training]
    before = _implementations(model.config)
    model.set_attn_implementation("anchor")
    model.eval()
    device = next(model.parameters()).device
    # weights that accelerate brings in layer by layer are nowhere until then; its hooks move the ids as well
    ids = input_ids if device.type == "meta" else input_ids.to(device)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "logits_to_keep" in inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters:
        arguments["logits_to_keep"] = 1
    try:
        # in a compiled forward nothing is decided, and so there is nothing to observe
        with observed(model, observer, **changes), torch.no_grad(), torch.compiler.set_stance("force_eager"):
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
