"""Tiny models whose blocks have no named layout, and what configs of several kinds share."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM

from blocks._models import adapted
from helpers import VOCAB

COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
PLAIN = {**COMMON, "intermediate_size": 96}
MOE = {**PLAIN, "num_key_value_heads": 2, "head_dim": 16, "experts_implementation": "eager"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNKNOWN = {
    "opt": (transformers.OPTConfig(**COMMON, ffn_dim=96, word_embed_proj_dim=64), ["q_proj", "v_proj", "fc1"]),
    "gpt_neox": (transformers.GPTNeoXConfig(**PLAIN), ["query_key_value", "dense_h_to_4h"]),
    "bloom": (transformers.BloomConfig(**COMMON, n_layer=2, n_head=4), ["query_key_value"]),
    "phi": (transformers.PhiConfig(**PLAIN), ["q_proj", "fc2"]),
    "cohere": (transformers.CohereConfig(**PLAIN, eos_token_id=2), ["q_proj", "up_proj"]),
    "qwen3_moe": (transformers.Qwen3MoeConfig(**MOE, **EXPERTS), ["q_proj", "o_proj"]),
    "mixtral": (transformers.MixtralConfig(**MOE, num_local_experts=4), ["q_proj", "v_proj"]),
}


def unknown_model(
    family: str, dtype: torch.dtype = torch.float64, lora_dropout: float = 0.2, **changes: Any
) -> PeftModel:
    """A model without a named layout, adapted; ``changes`` go to its config."""
    config, targets = UNKNOWN[family]
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return adapted(model=model, dtype=dtype, target_modules=targets, lora_dropout=lora_dropout)
