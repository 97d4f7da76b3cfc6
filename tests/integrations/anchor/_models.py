"""Tiny models of the families that ask something special of attention, and how their logits are compared."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import VOCAB, tiny_model
from hf_memeff.integrations.attention import AnchorAttentionConfig, register_anchor, set_anchor_config

register_anchor()

SUPERBLOCK = 32
LOGITS = 1e-4
"""Largest difference of fp32 logits from eager's: another order of the same sums."""

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_SCORES = ("q_proj.w", "k_proj.w", "qkv_proj.w", "q_b_proj.w", "kv_b_proj.w", "c_attn.w")
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def keep_all(**changes: Any) -> AnchorAttentionConfig:
    """Sparse at any length, keeping every key, in superblocks of 32 rows."""
    small = {"theta": float("inf"), "block_size": 8, "step": 4, "min_length": 1, "dense_above": None}
    return AnchorAttentionConfig(**{**small, **changes})


def build(kind: str, **changes: Any) -> PreTrainedModel:
    """A seeded tiny model in eval mode under eager attention."""
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **{
                **_TEXT,
                **_EXPERTS,
                "head_dim": 16,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                **changes,
            }
        )
    elif kind == "deepseek_v3":
        config = transformers.DeepseekV3Config(
            **{
                **_TEXT,
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 12,
                "first_k_dense_replace": 2,
                **changes,
            }
        )
    else:
        if kind == "gemma2":
            changes = {"attn_logit_softcapping": 2.0, **changes}
        return sharpened(tiny_model(kind, **changes).eval())
    torch.manual_seed(0)
    return sharpened(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def sharpened(model: PreTrainedModel) -> PreTrainedModel:
    """Scores of a few logits in place of a fresh model's hundredths, which would hide a wrong scale or kept set."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif any(
                part in name for part in ("q_proj.w", "k_proj.w", "qkv_proj.w", "q_b_proj.w", "kv_b_proj.w", "c_attn.w")
            ):
                parameter.mul_(5)
    return model


def tokens(rows: int, length: int, seed: int = 3) -> Tensor:
    """(rows, length) token ids without the padding id."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: int, length: int, side: str) -> dict[str, Tensor]:
    """Ids and mask; row 0 misses a third."""
    ids = tokens(rows, length)
    mask = torch.ones_like(ids)
    if side != "none":
        missing = slice(0, length // 3) if side == "left" else slice(length - length // 3, length)
        mask[0, missing] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: nn.Module, kind: str, config: AnchorAttentionConfig | None = None, **inputs: Any) -> Tensor:
    """Logits under an attention implementation."""
    model.set_attn_implementation(kind)
    if config is not None:
        set_anchor_config(model, config)
    with torch.no_grad():
        return model(**inputs).logits


def assert_equal_to_eager(model: nn.Module, config: AnchorAttentionConfig | None = None, **inputs: Any) -> None:
    """Logits of real tokens under "anchor" are eager's."""
    expected = logits(model, "eager", **inputs)
    found = logits(model, "anchor", config or keep_all(), **inputs)
    real = inputs.get("attention_mask", torch.ones(expected.shape[:2]))[:, -expected.shape[1] :, None]
    torch.testing.assert_close(found * real, expected * real, rtol=0, atol=LOGITS)
