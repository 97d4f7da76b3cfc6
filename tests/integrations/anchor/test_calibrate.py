"""Calibration and recall through a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_memeff.integrations.anchor import calibrate
from hf_memeff.integrations.attention import (
    NAME,
    AnchorAttentionConfig,
    anchor_report,
    calibrate_anchor,
    set_anchor_config,
)
from hf_memeff.ops.anchor.calibration import Thresholds
from integrations.anchor._models import SUPERBLOCK, build, keep_all, logits, tokens


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """What calibration must leave as it was."""
    settings = [getattr(module, "_hf_memeff_anchor", None) for module in model.modules()]
    return [m.training for m in model.modules()], settings, model.config._attn_implementation


@pytest.mark.parametrize("kind", ["eager", "sdpa", NAME])
def test_calibrated_thresholds_keep_the_target_on_like_text_and_change_nothing_else(kind: str) -> None:
    model = build("llama").train()
    model.set_attn_implementation(kind)
    set_anchor_config(model, keep_all())
    before = state_of(model)
    config = calibrate_anchor(model, tokens(2, 6 * SUPERBLOCK, seed=1), target_recall=0.8)
    assert state_of(model) == before
    assert config.theta == "auto" and sorted(config.thresholds) == [0, 1]
    assert all(len(row) == 4 for row in config.thresholds.values())
    assert (config.block_size, config.min_length) == (8, 1)
    set_anchor_config(model, config)
    report = anchor_report(model, tokens(2, 6 * SUPERBLOCK, seed=2))
    assert all(layer.recall > 0.8 and layer.recall_5th < layer.recall for layer in report.layers)
    assert "recall" in str(report)
    assert report.sparse_calls == 0  # measuring is not running
    logits(model.eval(), NAME, input_ids=tokens(1, 6 * SUPERBLOCK))
    assert anchor_report(model).density < 1


def test_a_higher_target_has_higher_thresholds() -> None:
    model = build("llama")
    set_anchor_config(model, keep_all())
    low, high = (calibrate_anchor(model, tokens(1, 200), target) for target in (0.6, 0.99))
    pairs = [
        (a, b) for layer in low.thresholds for a, b in zip(low.thresholds[layer], high.thresholds[layer], strict=True)
    ]
    assert all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def test_dense_layers_are_left_out_and_wrappers_seen_through() -> None:
    model = get_peft_model(build("gpt_oss"), LoraConfig(r=2, target_modules=["q_proj"]))
    set_anchor_config(model, keep_all())
    config = calibrate_anchor(model, tokens(1, 200))
    assert sorted(config.thresholds) == [1]
    set_anchor_config(model, config)


@pytest.mark.parametrize("target", [0, 1.5, True, "0.9", None], ids=str)
def test_targets_out_of_range(target: Any) -> None:
    with pytest.raises(ValueError, match=r"target_recall=.*expected a share"):
        calibrate_anchor(build("llama"), tokens(1, 200), target)


def test_a_text_that_is_too_short_is_an_error_that_says_how_long() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="expected well over 2048"):
        calibrate_anchor(model, tokens(1, 200))
    with pytest.raises(ValueError, match="batch, tokens"):
        calibrate_anchor(model, tokens(1, 200)[0])
    set_anchor_config(model, AnchorAttentionConfig())
    with pytest.raises(ValueError, match="longer text"):
        anchor_report(model, tokens(1, 200))


def test_recall_is_one_where_every_key_is_kept() -> None:
    model = build("llama")
    set_anchor_config(model, keep_all())
    report = anchor_report(model, tokens(1, 200))
    assert all(layer.recall == pytest.approx(1.0, abs=1e-5) for layer in report.layers)


def test_no_grad_is_left_behind() -> None:
    model = build("llama")
    set_anchor_config(model, keep_all())
    calibrate_anchor(model, tokens(1, 200))
    assert all(parameter.grad is None for parameter in model.parameters()) and torch.is_grad_enabled()


@pytest.mark.parametrize("cheaper", [16, 8])
def test_defaults_get_the_superblock_with_fewer_scores_and_settings_keep_theirs(
    cheaper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def counted(*args: Any) -> Thresholds:
        step = args[4].step
        tried.append(step)
        return Thresholds(torch.full((4,), float(step)), 1.0 if step == cheaper else 2.0)

    monkeypatch.setattr(calibrate, "least_thresholds", counted)
    model = build("llama")
    ids = tokens(1, 2049 + 128)
    config = calibrate_anchor(model, ids)
    assert (config.step, config.thresholds[0][0]) == (cheaper, cheaper) and set(tried) == {16, 8}
    tried.clear()
    set_anchor_config(model, AnchorAttentionConfig(theta=5.0))
    assert calibrate_anchor(model, ids).step == 16 and set(tried) == {16}


@pytest.mark.parametrize("wrong", [[[3, 4, 5]], tokens(1, 64)[0], tokens(1, 0), {"input_ids": tokens(1, 64)}])
def test_what_is_no_batch_of_token_ids_is_refused_with_the_call_that_makes_one(wrong: Any) -> None:
    model = build("llama")
    for call in (calibrate_anchor, anchor_report):
        with pytest.raises(ValueError, match=r"expected a tensor of token ids, \(batch, tokens\)\. Fix: .*input_ids"):
            call(model, wrong)


@pytest.mark.parametrize("how", ["offloaded", "wrapped by compile", "compiled in place"])
def test_offloaded_and_compiled_models_are_calibrated_alike(how: str) -> None:
    model = build("llama")
    set_anchor_config(model, AnchorAttentionConfig(block_size=8, step=2, min_length=1))
    ids = tokens(1, 120)
    expected, report = calibrate_anchor(model, ids), anchor_report(model, ids)
    if how == "offloaded":
        cpu_offload(model, execution_device="cpu")  # leaves every parameter on the device "meta" between calls
    elif how == "wrapped by compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    assert calibrate_anchor(model, ids) == expected
    assert [layer.recall for layer in anchor_report(model, ids).layers] == [layer.recall for layer in report.layers]


def test_logits_beyond_any_threshold_keep_every_key_and_nan_is_an_error() -> None:
    model = build("llama")
    set_anchor_config(model, AnchorAttentionConfig(block_size=8, step=2, min_length=1))
    weight = model.model.layers[0].self_attn.q_proj.weight.data
    weight.mul_(1e6)
    assert set(calibrate_anchor(model, tokens(1, 120), 1.0).thresholds[0]) == {math.inf}
    weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"scores of layer 0 that are not numbers"):
        calibrate_anchor(model, tokens(1, 120))
