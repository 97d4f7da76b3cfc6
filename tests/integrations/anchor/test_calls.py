"""Single calls: which path they take, and that each is dense attention where it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from hf_memeff.integrations.anchor import calls
from hf_memeff.integrations.anchor.calls import attend_densely, dense_reason, read_call
from hf_memeff.integrations.attention import (
    NAME,
    AnchorAttentionConfig,
    anchor_attention_forward,
    anchor_report,
    set_anchor_config,
)
from hf_memeff.ops.anchor.layout import layout_mask
from integrations.anchor._models import LOGITS, build, keep_all, logits, tokens

ROWS, KEYS = 70, 90
TOLERANCE = 1e-5


def module(causal: bool | None = True, groups: int = 2) -> nn.Module:
    found = nn.Module().eval()
    found.num_key_value_groups = groups
    if causal is not None:
        found.is_causal = causal
    return found


def tensors(rows: int = ROWS, keys: int = ROWS, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, 4, rows, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 8)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Eager attention in float64, (B, Nq, H, Dv)."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.transpose(2, 3) * 8**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights.nan_to_num() @ v).transpose(1, 2).float()


LAYOUTS = {
    "plain": None,
    "left": torch.tensor([[0] * 20 + [1] * 50, [1] * 70]),
    "right": torch.tensor([[1] * 50 + [0] * 20, [1] * 70]),
    "gap": torch.tensor([[1] * 30 + [0] * 5 + [1] * 35, [1] * 70]),
    "packed": torch.tensor([[1] * 7 + [2] * 40 + [3] * 23] * 2),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "special", [{}, {"softcap": 0.5}, {"s_aux": True}, {"sliding_window": 9}, {"dropout": 0.0}], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_is_eager_whatever_a_call_asks_for(layout: str, special: dict[str, Any], grad: bool) -> None:
    q, k, v = tensors()
    q.requires_grad_(grad)
    special = dict(special)
    sinks = special["s_aux"] = torch.randn(4) if special.get("s_aux") else None
    ids = LAYOUTS[layout]
    call = read_call(module(), q, k, v, ids, True, 8**-0.5, special.pop("dropout", 0.0), **special)
    names = torch.ones(1, ROWS, dtype=torch.int) if ids is None else ids
    seen = layout_mask(names, ROWS, special.get("sliding_window"))
    expected = formula(q, k, v, seen, special.get("softcap"), sinks)
    real = (names != 0)[:, :, None, None]
    found = attend_densely(call)
    torch.testing.assert_close(found * real, expected * real, rtol=0, atol=TOLERANCE)
    assert found.requires_grad == grad


@pytest.mark.parametrize(
    "special", [{}, {"softcap": 0.5}, {"s_aux": torch.randn(4)}, {"sliding_window": 9}], ids=lambda s: str([*s])
)
@pytest.mark.parametrize("shape", [(1, 90), (5, 90), (70, 90)])
def test_queries_are_the_last_rows_of_the_keys(shape: tuple[int, int], special: dict[str, Any]) -> None:
    q, k, v = tensors(*shape)
    call = read_call(module(), q, k, v, None, True, 8**-0.5, 0.0, **special)
    seen = layout_mask(torch.ones(1, shape[1], dtype=torch.int), shape[0], special.get("sliding_window"))
    expected = formula(q, k, v, seen, special.get("softcap"), special.get("s_aux"))
    torch.testing.assert_close(attend_densely(call), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("special", [{}, {"softcap": 0.5}, {"s_aux": torch.randn(4)}], ids=lambda s: str([*s]))
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_users_own_mask_is_taken_as_it_is(special: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = tensors()
    seen = (torch.rand(2, 1, ROWS, ROWS) < 0.5) | torch.eye(ROWS, dtype=torch.bool)
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)
    call = read_call(module(), q, k, v, mask, True, 8**-0.5, 0.0, **special)
    expected = formula(q, k, v, seen, special.get("softcap"), special.get("s_aux"))
    torch.testing.assert_close(attend_densely(call), expected, rtol=0, atol=TOLERANCE)
    assert dense_reason(call, keep_all(), 0) == "mask"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"causal": False}, "not causal"),
        ({"causal": None}, "not causal"),
        ({"causal": None, "mask": torch.ones(2, ROWS, dtype=torch.bool)}, None),
        ({"rows": 1}, "decode"),
        ({"rows": 7}, "short"),
        ({"rows": 70, "keys": 60}, "not causal"),
        ({"sliding_window": 1000}, "sliding window"),
        ({"mask": torch.ones(2, 1, ROWS, ROWS, dtype=torch.bool)}, "mask"),
        ({"mask": LAYOUTS["gap"]}, "gap in padding"),
        ({"mask": LAYOUTS["left"]}, None),
        ({"softcap": 1.0}, "softcap"),
        ({"position_bias": torch.zeros(1, 4, ROWS, ROWS)}, "position bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"config": {"min_length": 71}}, "short"),
        ({"config": {"dense_above": "auto"}}, "every key kept"),
        ({"config": {"dense_above": 0.5}}, "every key kept"),
    ],
    ids=str,
)
def test_reasons(changes: dict[str, Any], reason: str | None) -> None:
    changes = dict(changes)
    rows = changes.pop("rows", ROWS)
    q, k, v = tensors(rows, changes.pop("keys", ROWS))
    config = keep_all(**changes.pop("config", {}))
    causal, mask, dropout = changes.pop("causal", True), changes.pop("mask", None), changes.pop("dropout", 0.0)
    call = read_call(module(), q, k, v, mask, causal, 8**-0.5, dropout, **changes)
    assert dense_reason(call, config, 0) == reason


def test_training_is_dense_whatever_the_grad_mode() -> None:
    q, k, v = tensors()
    training = module().train()
    with torch.no_grad():
        call = read_call(training, q, k, v, None, True, 8**-0.5, 0.0)
        assert dense_reason(call, keep_all(), 0) == "training"
    k.requires_grad_()
    call = read_call(module(), q, k, v, None, True, 8**-0.5, 0.0)
    assert dense_reason(call, keep_all(), 0) == "gradient"
    with torch.no_grad():
        assert dense_reason(call, keep_all(), 0) is None


def test_all_superblocks_dense_by_their_kept_share_is_a_dense_call() -> None:
    q, k, v = tensors()
    layer = module()
    layer.layer_idx = 0
    set_anchor_config(layer, keep_all(theta=1e4, dense_above=0.9))
    anchor_attention_forward(layer, q, k, v, None)
    report = anchor_report(layer)
    assert (report.sparse_calls, report.dense_calls) == (0, {"kept share": 1})


def test_lengths_that_are_not_these_rows_are_refused() -> None:
    q, k, v = tensors(batch=1)
    with pytest.raises(ValueError, match="continuous batching"):
        read_call(module(), q, k, v, None, True, 1.0, 0.0, cu_seq_lens_q=torch.tensor([0, 30, 60]))
    with pytest.raises(ValueError, match="ends with the last query"):
        read_call(module(), q, k, v, torch.ones(1, 30), True, 1.0, 0.0)


def test_a_mask_is_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    read = calls.layout_segments
    monkeypatch.setattr(calls, "layout_segments", lambda *args: (times.append(1), read(*args))[1])
    model = build("llama", num_hidden_layers=4)
    ids = tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    for _ in range(2):
        logits(model, NAME, keep_all(), input_ids=ids, attention_mask=mask)
    assert len(times) == 2
    layout = LAYOUTS["left"].clone()
    q, k, v = tensors()
    before = read_call(module(), q, k, v, layout, True, 1.0, 0.0).segments
    layout[0, :30] = 0
    assert read_call(module(), q, k, v, layout, True, 1.0, 0.0).segments != before


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


def test_default_settings_leave_short_prompts_to_sdpa_bit_for_bit() -> None:
    model = build("llama")
    for inputs in ({"input_ids": tokens(2, 100)}, {"input_ids": tokens(1, 1)}):
        expected = logits(model, "sdpa", **inputs)
        assert torch.equal(logits(model, NAME, AnchorAttentionConfig(), **inputs), expected)
