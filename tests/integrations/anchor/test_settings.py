"""Settings stay with the model, and come and go as they are told."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_memeff.integrations.attention import (
    NAME,
    AnchorAttentionConfig,
    anchor_report,
    set_anchor_config,
    use_anchor_config,
)
from integrations.anchor._models import build, keep_all, logits, tokens


def test_settings_change_the_result_and_a_new_set_counts_from_zero() -> None:
    model = build("llama")
    ids = tokens(1, 200)
    every = logits(model, NAME, keep_all(), input_ids=ids)
    few = logits(model, NAME, keep_all(theta=-5.0), input_ids=ids)
    assert (few - every).abs().max() > 1e-3
    assert anchor_report(model).sparse_calls == 2 and anchor_report(model).density == 0
    set_anchor_config(model, keep_all())
    assert anchor_report(model).sparse_calls == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 16},
        {"step": 2},
        {"init_blocks": 0},
        {"dense_tail": 100},
        {"max_keep": 3},
        {"dense_above": 0.2},
        {"min_length": 300},
    ],
    ids=str,
)
def test_every_field_does_something(changes: dict[str, Any]) -> None:
    model = build("llama")
    ids = tokens(1, 200)
    before = logits(model, NAME, keep_all(theta=1.0), input_ids=ids)
    assert (logits(model, NAME, keep_all(theta=1.0, **changes), input_ids=ids) - before).abs().max() > 1e-5


def test_backends_by_name_agree_and_are_in_the_report() -> None:
    model = build("llama")
    found = {}
    for backend in ("torch", "reference"):
        found[backend] = logits(model, NAME, keep_all(theta=1.0, backend=backend), input_ids=tokens(2, 150))
        assert {layer.backend for layer in anchor_report(model).layers} == {backend}
        assert 0 < anchor_report(model).density < 1
    torch.testing.assert_close(found["torch"], found["reference"], rtol=0, atol=1e-4)


def test_strict_refuses_a_fallback_and_not_what_is_dense_by_nature() -> None:
    model = build("gemma2")
    ids = tokens(1, 100)
    logits(model, NAME, keep_all(strict=True, min_length=101), input_ids=ids)
    logits(build("mistral"), NAME, keep_all(strict=True), input_ids=ids)
    with pytest.raises(ValueError, match=r"densely \(softcap\).*strict=True.*Fix"):
        logits(model, NAME, keep_all(strict=True), input_ids=ids)
    mask = torch.ones(1, 1, 100, 100, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"\(mask\)"):
        logits(build("llama"), NAME, keep_all(strict=True), input_ids=ids, attention_mask=mask)


def test_a_block_of_other_settings_leaves_those_before_it() -> None:
    model = build("llama")
    ids = tokens(1, 200)
    before = logits(model, NAME, keep_all(), input_ids=ids)
    with use_anchor_config(model, keep_all(theta=-5.0)):
        inside = logits(model, NAME, input_ids=ids)
        assert anchor_report(model).sparse_calls == 2
    assert not torch.equal(inside, before)
    assert torch.equal(logits(model, NAME, input_ids=ids), before)
    assert anchor_report(model).sparse_calls == 4  # those before the block and the one after it


def test_a_block_leaves_a_model_without_settings_untouched_even_after_an_error() -> None:
    model = build("llama")
    untouched = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError), use_anchor_config(model, keep_all()):
        raise RuntimeError
    assert {name: set(vars(module)) for name, module in model.named_modules()} == untouched


def test_copies_take_settings_along_and_models_do_not_share_them(tmp_path: Path) -> None:
    model, other = build("llama"), build("llama")
    ids = tokens(1, 200)
    set_anchor_config(model, keep_all(theta=-5.0))
    expected = logits(model, NAME, input_ids=ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, NAME, input_ids=ids), expected)
    assert not torch.equal(logits(other, NAME, input_ids=ids), expected)
    assert anchor_report(other).dense_calls == {"short": 2}  # the default is for prompts of 4096 and more
    model.save_pretrained(tmp_path)
    assert not any("anchor" in path.read_text() for path in tmp_path.glob("*.json"))
    assert not any("anchor" in key for key in model.state_dict())


def test_a_wrapped_model_is_reached_through_its_wrapper() -> None:
    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj"])).eval()
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all())
    with torch.no_grad():
        model(input_ids=tokens(1, 100))
    assert anchor_report(model).sparse_calls == 2


@pytest.mark.parametrize("wrong", [None, {"theta": 3}, 12.0], ids=str)
def test_only_a_config_is_taken(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected an AnchorAttentionConfig"):
        set_anchor_config(build("llama"), wrong)


def test_a_model_without_attention_and_a_backend_that_does_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="without attention modules"):
        set_anchor_config(nn.Linear(2, 2), AnchorAttentionConfig())
    with pytest.raises(ValueError, match="backend='nothing'"):
        set_anchor_config(build("llama"), AnchorAttentionConfig(backend="nothing"))


@pytest.mark.parametrize("thresholds", [{0: [1.0] * 3}, {5: [1.0] * 4}], ids=["heads", "layer"])
def test_thresholds_of_another_model_are_refused(thresholds: dict[int, list[float]]) -> None:
    with pytest.raises(ValueError, match="calibrate this model"):
        set_anchor_config(build("llama"), AnchorAttentionConfig(theta="auto", thresholds=thresholds))


def test_thresholds_are_used_by_layer_and_head() -> None:
    model = build("llama")
    thresholds = {0: [math.inf, -5.0, math.inf, -5.0], 1: [-5.0] * 4}
    logits(model, NAME, keep_all(theta="auto", thresholds=thresholds), input_ids=tokens(1, 200))
    assert [layer.density for layer in anchor_report(model).layers] == [0.5, 0.0]


def test_a_layer_without_thresholds_is_an_error_only_where_it_would_be_sparse() -> None:
    model = build("llama")
    ids = tokens(1, 100)
    config = keep_all(theta="auto", thresholds={0: [1.0] * 4})
    logits(model, NAME, config, input_ids=ids[:, :20])
    with pytest.raises(ValueError, match="layer 1"):
        logits(model, NAME, config, input_ids=ids)
    hybrid = build("gemma3")  # layer 0 has a window: it is dense, and needs none
    logits(hybrid, NAME, keep_all(theta="auto", thresholds={1: [1.0] * 4}), input_ids=ids)
    assert anchor_report(hybrid).sparse_calls == 1
