"""Tiny seeded models and small tools that the tests share. `import helpers` works in every test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_memeff import MespConfig
from hf_memeff.compat import installed_version

VOCAB = 128

needs_peft_021 = pytest.mark.skipif((installed_version("peft") or ()) < (0, 21), reason="peft 0.20 has no hook for it")

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"head_dim": 16, "sliding_window": 16}

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": 16}),
    "gemma2": (transformers.Gemma2Config, _SLIDING),
    "gemma3": (transformers.Gemma3TextConfig, {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 16}),
    "olmo2": (transformers.Olmo2Config, {}),
    "granite": (transformers.GraniteConfig, {"residual_multiplier": 0.22, "attention_multiplier": 0.3}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "gpt2": (transformers.GPT2Config, {"n_inner": 112}),
}
"""Config class and settings of each named layout, all with hidden size 64, two layers and four heads."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"head_dim": 16, **_EXPERTS}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "head_dim": 16}),
}
"""Models without a named layout, for what is special about them."""


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A two-layer causal LM of a family; its random weights depend on `seed` alone, `overrides` change its config."""
    config_cls, settings = FAMILIES[family] if family in FAMILIES else OTHERS[family]
    config = config_cls(**{**_DECODER, **settings, **overrides})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_rng_state(state)


def fill_adapters(model: nn.Module, std: float = 0.1, seed: int = 1) -> None:
    """Give every lora_A and lora_B random values that depend on order and `seed`: a fresh, zero lora_B hides errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


IDS = torch.arange(3, 24).view(1, -1)
"""One row of token ids."""

_TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}


def adapted_model(
    config_cls: type[LoraConfig] = MespConfig,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    name: str = "default",
    **settings: Any,
) -> PeftModel:
    """A tiny model with one adapter, filled with the same random values whatever the config class."""
    fields = {"r": 4, "target_modules": _TARGETS.get(family, "all-linear"), "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(tiny_model(family, dtype=dtype), config_cls(**fields), adapter_name=name)
    fill_adapters(model)
    return model


def logits_of(model: nn.Module, **kwargs: Any) -> Tensor:
    """Logits for `IDS` in evaluation mode."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **kwargs).logits


def assert_untouched(model: nn.Module, fresh: nn.Module) -> None:
    """Assert that a model has the classes, instance attributes, hooks, keys and tags of one that never met PEFT."""
    assert list(model.state_dict()) == list(fresh.state_dict())
    assert model.model_tags == fresh.model_tags
    for (name, module), (_, other) in zip(model.named_modules(), fresh.named_modules(), strict=True):
        assert type(module) is type(other), name
        assert set(module.__dict__) - {"peft_config"} == set(other.__dict__), name
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
            assert not getattr(module, hooks), (name, hooks)


def token_batch(rows: int = 2, length: int = 19, padding: str = "none", seed: int = 5) -> dict[str, Tensor]:
    """input_ids, attention_mask and labels; `padding` "left" or "right" pads a third of row 0, labelled -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, : length // 3] = 0
    elif padding == "right":
        mask[0, -(length // 3) :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:] = labels[:, 1:].masked_fill(
        mask[:, :-1] == 0, -100
    )  # the row before the first token predicts nothing
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_and_gradients(model: nn.Module, batch: dict[str, Tensor], seed: int = 11) -> tuple[float, dict[str, Tensor]]:
    """Loss of one training call and each parameter's gradient by name, as float64; gradients are cleared after."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), gradients


def worst_relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest |got - expected| / |expected| over single tensors (2-norms). Both must hold the same names."""
    assert set(got) == set(expected), sorted(set(got) ^ set(expected))[:4]
    return max(((got[n] - e).norm() / e.norm().clamp_min(1e-30)).item() for n, e in expected.items())


def run_python(code: str, *, hide_package: bool = False, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, offline; with `hide_package`, importing hf_memeff there fails."""
    if hide_package:
        code = "import sys; sys.modules['hf_memeff'] = None\n" + code
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONWARNINGS", "PYTHONPATH")}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=timeout_s)


@contextmanager
def forbid_network() -> Iterator[None]:
    """Make every attempt to open a connection or look up a name fail the test."""
    import socket

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was used")

    kept = socket.socket.connect, socket.getaddrinfo
    socket.socket.connect, socket.getaddrinfo = refuse, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = kept  # type: ignore[method-assign]
