"""The support matrix: every block layout on a tiny random model, against plain LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_memeff.benchmarks.comparison import fill_adapters, with_shared_weights, wrap
from hf_memeff.benchmarks.results import Environment, FamilyResult
from hf_memeff.blocks.layouts import LAYOUTS
from hf_memeff.tuners.attach import memeff_status

FP64_LIMIT = 1e-9
FP32_LIMIT = 1e-5

_VOCABULARY, _ROWS, _TOKENS, _PADDED, _WINDOW = 128, 2, 24, 7, 16
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWED = {"head_dim": 16, "sliding_window": _WINDOW}
_LAYER_TYPES = ["sliding_attention", "full_attention"]

# By the class of the decoder layer, as in LAYOUTS; windows are shorter than the sequence, so that they matter.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaDecoderLayer": ("LlamaConfig", {}),
    "Qwen2DecoderLayer": ("Qwen2Config", {}),
    "Qwen3DecoderLayer": ("Qwen3Config", {"head_dim": 16}),
    "MistralDecoderLayer": ("MistralConfig", _WINDOWED),
    "SmolLM3DecoderLayer": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "Gemma2DecoderLayer": ("Gemma2Config", _WINDOWED),
    "Gemma3DecoderLayer": ("Gemma3TextConfig", {**_WINDOWED, "layer_types": _LAYER_TYPES}),
    "Phi3DecoderLayer": ("Phi3Config", {"sliding_window": _WINDOW}),
    "Olmo2DecoderLayer": ("Olmo2Config", {}),
    "GraniteDecoderLayer": ("GraniteConfig", {"residual_multiplier": 0.22, "attention_multiplier": 0.3}),
    "GPT2Block": ("GPT2Config", {"n_inner": 112}),
}


def measure_families(layers: Sequence[str] = tuple(LAYOUTS)) -> Iterator[FamilyResult]:
    """Compare MeSP's gradients with plain LoRA's on 2 padded rows of 24 tokens, longer than any sliding window.

    Args:
        layers: keys of `LAYOUTS`.

    Yields:
        One result per layer class.

    Raises:
        KeyError: there is no tiny model for a layer class.
    """
    environment = Environment.here()
    for layer in layers:
        paths, fp64_error = _compare(layer, torch.float64)
        _, fp32_error = _compare(layer, torch.float32)
        reasons = sorted({reason for _, reason in paths if reason})
        kinds = {path for path, _ in paths}
        yield FamilyResult(
            family=LAYOUTS[layer].name,
            layer=layer,
            path=kinds.pop() if len(kinds) == 1 else "mixed",
            reason="; ".join(reasons),
            fp64_error=fp64_error,
            fp32_error=fp32_error,
            environment=environment,
        )


def holds(result: FamilyResult) -> bool:
    """Whether all blocks ran structured and the gradients were plain LoRA's."""
    return result.path == "structured" and result.fp64_error <= FP64_LIMIT and result.fp32_error <= FP32_LIMIT


def _compare(layer: str, dtype: torch.dtype) -> tuple[list[tuple[str, str]], float]:
    """Path and reason of each block, and the largest relative error of a single adapter tensor."""
    base = _tiny_model(layer).to(dtype)
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
    fields["fan_in_fan_out"] = (
        layer == "GPT2Block"
    )  # its Conv1D has its weight the other way round; PEFT warns if unsaid
    lora, mesp = (wrap(with_shared_weights(base), name, task_type="CAUSAL_LM", **fields) for name in ("lora", "mesp"))
    for model in (lora, mesp):
        model.to(dtype)  # PEFT makes float32 adapters on a float16 base only; here all is one dtype
    fill_adapters([lora, mesp], std=0.1)
    # transformers' eager attention gives NaN for rows of padding on the left in float64, stock LoRA included
    side = "right" if dtype == torch.float64 else "left"
    expected, got = _gradients(lora, side), _gradients(mesp, side)
    errors = torch.stack([(got[name] - true).norm() / true.norm() for name, true in expected.items()])
    # torch's maximum keeps a NaN, Python's may not
    return [(block.path, block.reason) for block in memeff_status(mesp).blocks], errors.max().item()


def _tiny_model(layer: str) -> Any:
    name, settings = _CONFIGS[layer]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**_COMMON, **settings}))


def _gradients(model: Any, padding_side: str) -> dict[str, Tensor]:
    """Gradients of one step by parameter name, as float64; the first row has padding."""
    ids = torch.randint(3, _VOCABULARY, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, slice(None, _PADDED) if padding_side == "left" else slice(-_PADDED, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if padding_side == "left":
        labels[0, _PADDED] = -100  # would be predicted from padding
    torch.manual_seed(1)
    model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.requires_grad}
