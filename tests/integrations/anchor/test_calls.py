"""Single calls: which path they take, and that each is dense attention where it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    for mask in (torch.ones(1, 30, dtype=torch.int), torch.zeros(1, ROWS)):  # too short; added to scores
        with pytest.raises(ValueError, match="ends with the last query"):
            read_call(module(), q, k, v, mask, True, 1.0, 0.0)


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


def test_default_settings_leave_short_prompts_to_sdpa_bit_for_bit() -> None:
    model = build("llama")
    for inputs in ({"input_ids": tokens(2, 100)}, {"input_ids": tokens(1, 1)}):
        expected = logits(model, "sdpa", **inputs)
        assert torch.equal(logits(model, NAME, AnchorAttentionConfig(), **inputs), expected)


def test_under_autocast_sums_are_whole_and_the_result_is_what_half_precision_inputs_give() -> None:
    q, k, v = tensors()
    layer = module()
    layer.layer_idx = 0
    for special in ({}, {"softcap": 0.5}):
        for config in (keep_all(), AnchorAttentionConfig()):
            set_anchor_config(layer, config)
            half = (x.to(torch.bfloat16) for x in (q, k, v))
            expected, _ = anchor_attention_forward(layer, *half, None, **special)
            with torch.autocast("cpu", torch.bfloat16):
                # a model's rotary embedding may leave queries and keys in float32
                found, _ = anchor_attention_forward(layer, q, k, v.to(torch.bfloat16), None, **special)
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, expected)


def test_sinks_of_another_shape_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="one sink per query head"):
        read_call(module(), q, k, v, None, True, 1.0, 0.0, s_aux=torch.zeros(2))


def test_a_trained_sink_alone_is_a_gradient() -> None:
    q, k, v = tensors()
    call = read_call(module(), q, k, v, None, True, 8**-0.5, 0.0, s_aux=torch.zeros(4, requires_grad=True))
    assert dense_reason(call, keep_all(), 0) == "gradient"
    assert attend_densely(call).requires_grad


def test_a_mask_that_is_changed_in_inference_mode_is_read_again() -> None:
    q, k, v = tensors()
    with torch.inference_mode():
        layout = LAYOUTS["left"] + 0
        before = read_call(module(), q, k, v, layout, True, 1.0, 0.0).segments
        layout[0, :30] = 0
        assert read_call(module(), q, k, v, layout, True, 1.0, 0.0).segments != before


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_compiled_model_is_dense_and_right(family: str) -> None:
    model = build(family)
    ids = tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    expected = logits(model, "eager", input_ids=ids, attention_mask=mask)
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all(theta=-5.0))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = compiled(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=LOGITS)
    for layer in model.model.layers:  # layers compiled by themselves get the mask that an uncompiled model makes
        layer.compile(backend="eager")
    found = logits(model, NAME, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=LOGITS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_a_model_without_values_can_be_run_for_its_shapes(family: str) -> None:
    model = build(family).to("meta")
    ids = tokens(2, 100).to("meta")
    assert logits(model, NAME, keep_all(), input_ids=ids).shape == (2, 100, 128)
