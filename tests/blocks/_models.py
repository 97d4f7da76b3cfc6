"""Adapted tiny models whose every part matters, and one step of them with and without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from blocks._tolerances import relative_error
from helpers import VOCAB, fill_adapters, tiny_model
from hf_memeff.blocks.attach import attach_blocks, detach_blocks, engine_status
from hf_memeff.blocks.options import EngineOptions

LAYOUTS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "gpt2",
)
"""The named layouts, by the names of ``helpers.FAMILIES``."""

LENGTH = 23
"""Tokens in a row: odd, and more than the sliding window of 16."""

_TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}

# A neutral default (a multiplier of 1, a cap that tiny random models never reach) would hide a mistake.
_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 7},
    "gemma3": {"query_pre_attn_scalar": 7, "final_logit_softcapping": 1.5},
    "granite": {
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 5.0,
        "logits_scaling": 3.0,
    },
}


def lively_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """``tiny_model`` with weights large enough for curved softmaxes and activations; norm weights and biases random."""
    model = tiny_model(family, dtype, **{"initializer_range": 0.12, **_SETTINGS.get(family, {}), **overrides})
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype), alpha=0.3
                )
    return model


def adapted(
    family: str = "llama",
    dtype: torch.dtype = torch.float64,
    *,
    adapter_dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
    overrides: dict[str, Any] | None = None,
    **lora: Any,
) -> PeftModel:
    """A plain-LoRA model in training mode with random non-zero factors; the engine is not attached.

    ``adapter_dtype`` defaults to ``dtype``; ``overrides`` change the model's config, ``lora`` the adapter's.
    """
    if model is None:
        model = lively_model(family, dtype, **(overrides or {}))
    fields = {"r": 3, "lora_alpha": 5, "target_modules": _TARGETS.get(family, "all-linear"), "task_type": "CAUSAL_LM"}
    if family == "gpt2":
        fields["fan_in_fan_out"] = True
    peft_model = get_peft_model(model, LoraConfig(**{**fields, **lora}), autocast_adapter_dtype=False)
    fill_adapters(peft_model, 0.2)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype or dtype)
    return peft_model.train()


def packed_batch(length: int = LENGTH) -> dict[str, Tensor]:
    """Two rows of two samples each, told apart by position ids that start again; no mask."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, length), generator=generator)
    first = torch.tensor([length // 3, length // 2])
    positions = torch.arange(length)[None] - torch.where(torch.arange(length)[None] < first[:, None], 0, first[:, None])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


@contextlib.contextmanager
def engine(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """The engine on a model for the duration. Yields the module it is attached to."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    attach_blocks(base, EngineOptions(**options))
    try:
        yield base
    finally:
        detach_blocks(base)


class Step(NamedTuple):
    """Loss and gradients (float64, by name) of one training call; ``random`` is the generator's state after it."""

    loss: Tensor
    gradients: dict[str, Tensor]
    random: Tensor


def step(model: nn.Module, batch: dict[str, Any], seed: int = 11) -> Step:
    """One forward and backward from a fixed seed; gradients are cleared after."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**batch).loss
    state = torch.get_rng_state()
    loss.backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(loss.detach(), gradients, state)


def errors(got: Step, expected: Step) -> dict[str, float]:
    """Relative error of the loss and of each gradient. Both must have the same ones, and none may be all zero."""
    assert set(got.gradients) == set(expected.gradients), sorted(set(got.gradients) ^ set(expected.gradients))[:4]
    assert expected.gradients and all(g.any() for g in expected.gradients.values())
    found = {n: relative_error(got.gradients[n], e) for n, e in expected.gradients.items()}
    return {"loss": relative_error(got.loss, expected.loss), **found}


def worst_errors(model: nn.Module, batches: dict[str, dict[str, Any]], **options: Any) -> dict[str, float]:
    """For each batch, the largest relative error of the engine's loss and gradients against stock LoRA's, same model.

    All blocks must be structured unless ``strict=False`` is given.
    """
    expected = {name: step(model, batch) for name, batch in batches.items()}
    with engine(model, **{"strict": True, **options}):
        got = {name: step(model, batch) for name, batch in batches.items()}
        if options.get("strict", True):  # else nothing but stock LoRA would be compared with itself
            assert paths(model) and set(paths(model)) == {"structured"}
    for name in batches:
        same = torch.equal(got[name].random, expected[name].random)
        assert same, f"{name}: the engine consumed other random numbers than LoRA"
    return {name: max(errors(got[name], expected[name]).values()) for name in batches}


def worst_error(model: nn.Module, batch: dict[str, Any], **options: Any) -> float:
    """``worst_errors`` of one batch."""
    return worst_errors(model, {"batch": batch}, **options)["batch"]


def paths(model: nn.Module) -> list[str]:
    """Path of each block."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return [block.path for block in engine_status(base).blocks]
