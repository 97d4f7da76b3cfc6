"""C51: of a vision-language model, the text decoder is sparse and the vision tower dense."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from hf_memeff.integrations.attention import NAME, anchor_report, set_anchor_config
from integrations.anchor._models import LOGITS, keep_all, logits, tokens


def vision_language(kind: str) -> nn.Module:
    text = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision, image_size=28, patch_size=14),
            text_config=transformers.LlamaConfig(**text),
            image_token_index=5,
            vision_feature_select_strategy="full",
            image_seq_length=5,
        )
    else:
        config = transformers.MllamaConfig(
            vision_config={
                **vision,
                "attention_heads": 2,
                "num_global_layers": 1,
                "image_size": 28,
                "patch_size": 14,
                "max_num_tiles": 1,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1]],
            },
            text_config={
                **text,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                "pad_token_id": 0,
            },
            image_token_index=127,
        )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def seen_by(kind: str) -> dict[str, Tensor]:
    ids = tokens(1, 100) % 100 + 20
    torch.manual_seed(1)
    if kind == "llava":
        ids[:, 3:8] = 5
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 1, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 100, 1, 1, dtype=torch.long),
    }


@pytest.mark.parametrize("kind", ["llava", "mllama"])
def test_c51_the_text_decoder_is_sparse_and_the_vision_tower_dense(kind: str) -> None:
    model = vision_language(kind)
    expected = logits(model, "eager", **seen_by(kind))
    found = logits(model, NAME, keep_all(), **seen_by(kind))
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)
    report = anchor_report(model)
    assert report.sparse_calls >= 1
    for layer in report.layers:
        called = layer.sparse_calls or layer.dense_calls
        if called and "language_model" not in layer.name:
            assert layer.sparse_calls == 0 and set(layer.dense_calls) == {"not causal"}, layer.name
    assert NAME in report.implementations.values()


def test_c51_only_the_sub_model_that_is_named_gets_it() -> None:
    model = vision_language("llava")
    expected = logits(model, "eager", **seen_by("llava"))
    model.set_attn_implementation({"text_config": NAME, "vision_config": "sdpa"})
    set_anchor_config(model, keep_all())
    with torch.no_grad():
        torch.testing.assert_close(model(**seen_by("llava")).logits, expected, rtol=0, atol=LOGITS)
    kinds = anchor_report(model).implementations
    assert sorted(kinds.values()).count(NAME) == 1 and "sdpa" in kinds.values()
