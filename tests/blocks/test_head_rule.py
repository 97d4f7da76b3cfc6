"""The rule for a head's output, and the check that compares the model's own logits with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from blocks._causal_loss import BATCH, compare, loss_path
from blocks._models import LAYOUTS, LENGTH, adapted, engine, errors, lively_model, step
from blocks._tolerances import ORDER_OF_SUMS
from blocks._unknown import unknown_model
from hf_memeff.blocks import causal_loss
from hf_memeff.blocks.head_rule import HeadRule, check_rule, head_rule

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def small_head(family, dtype, **settings):
    """A model of 16 classes: with so few, logits that are off hardly move the loss."""
    return lively_model(family, dtype, vocab_size=16, **settings).train()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", LAYOUTS)
def test_the_rule_read_from_the_config_passes(family, dtype):
    model = lively_model(family, dtype).train()
    assert check_rule(model, head_rule(model.config)) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [0.98, 1.02])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_a_scale_that_is_off_by_2_percent_is_found(family, off, dtype):
    model = small_head(family, dtype)
    rule = head_rule(model.config)
    assert check_rule(model, rule) == ""
    wrong = dataclasses.replace(rule, scale=rule.scale * off)
    assert "the check of its head found logits off by" in check_rule(model, wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cap", "rule_s_cap"), [(30.0, None), (None, 30.0), (30.0, 31.0), (1.5, 1.53), (200.0, None)])
def test_a_wrong_softcap_is_found(cap, rule_s_cap, dtype):
    """Caps far above the logits of the model too: a trained head can reach them."""
    model = small_head("gemma2", dtype, final_logit_softcapping=cap)
    assert check_rule(model, HeadRule(softcap=cap)) == ""
    assert "the check of its head found logits off by" in check_rule(model, HeadRule(softcap=rule_s_cap))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_of_the_head_s_weights_does_not_matter(dtype):
    model = small_head("granite", dtype)
    rule = head_rule(model.config)
    for factor in (1e-2, 10.0):
        model.lm_head.weight.data.mul_(factor)
        assert check_rule(model, rule) == ""
        assert check_rule(model, dataclasses.replace(rule, scale=rule.scale * 1.02)) != ""


def test_a_head_of_zeros_proves_nothing():
    model = small_head("llama", torch.float32)
    model.lm_head.weight.data.zero_()
    assert "off by nan" in check_rule(model, HeadRule())


def test_a_head_that_the_check_cannot_reach_runs_on_whole_logits():
    """OPT calls its decoder past its backbone, so that the check of its head fails: no tiling, LoRA's gradients."""
    model = unknown_model("opt", torch.float32, 0.0)
    assert compare(model, expected_path="logits") <= ORDER_OF_SUMS[torch.float32]
    with engine(model):
        assert "the check of its head" in loss_path(model)[1]
        assert model(**BATCH).logits.shape == (2, LENGTH, 128)


def test_a_wrong_rule_for_the_head_is_found(monkeypatch):
    """A family whose logits are scaled under a name nobody reads: the check sees it, and whole logits are used."""
    model = adapted("granite", torch.float32)
    monkeypatch.setattr(causal_loss, "head_rule", lambda config: causal_loss.HeadRule())
    expected = step(model, BATCH)
    with engine(model):
        path, reason = loss_path(model)
        got = step(model, BATCH)
    assert path == "logits" and "the check of its head found logits off by" in reason
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float32]


def test_the_check_of_the_head_leaves_no_trace():
    model = adapted("gemma2", torch.float32)
    base = model.get_base_model()
    calls = []
    base.model.register_forward_hook(lambda *args: calls.append(args))
    state, keys = torch.get_rng_state(), {n: sorted(m.__dict__) for n, m in base.named_modules() if n == "model"}
    with engine(model):
        assert loss_path(model) == ("tiled", "")
        assert torch.equal(torch.get_rng_state(), state) and not calls
        assert {n: sorted(m.__dict__) for n, m in base.named_modules() if n == "model"} == keys
    assert all(p.grad is None for p in model.parameters())
