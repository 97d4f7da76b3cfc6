"""The rule for a head's output, and the check that compares the model's own logits with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from blocks._models import LAYOUTS, lively_model
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
