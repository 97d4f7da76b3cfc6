"""Every method trains the same adapter values, in its own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from hf_memeff import MespConfig, SageConfig
from hf_memeff.benchmarks.sage_methods import BUDGETS, NAMES, SALIENCIES, SageMethod, expand, make_model


def test_only_sage_has_budgets() -> None:
    methods = expand(NAMES, BUDGETS)
    assert len(methods) == len(set(methods)) == 3 + len(SALIENCIES) * len(BUDGETS)
    assert {m.token_budget for m in methods if m.saliency is None} == {None}
    assert {m.saliency for m in methods} == {None, *SALIENCIES}


@pytest.mark.parametrize("method", [*expand(NAMES, [0.5]), SageMethod("sage-attention", 0.5, (), "all")], ids=str)
def test_a_model_is_trained_as_its_method_says(method: SageMethod, base: Any) -> None:
    model, lora = (make_model(way, base, rank=3, seed=4) for way in (method, SageMethod("lora")))
    config = model.peft_config["default"]
    assert type(config) is {"l": LoraConfig, "m": MespConfig, "s": SageConfig}[method.name[0]]
    assert (config.r, config.lora_alpha) == (3, 8)
    assert model.training
    assert model.is_gradient_checkpointing == (method.name == "lora-checkpointing")
    if isinstance(config, SageConfig):
        assert (config.saliency, config.token_budget) == (method.saliency, 0.5)
        assert (config.dense_layers, config.backward_keys) == (method.dense_layers, method.backward_keys)
    own, same = ({n: p for n, p in m.named_parameters() if p.requires_grad} for m in (model, lora))
    assert own.keys() == same.keys() and len(own) == 2 * 2 * 7
    assert all(torch.equal(own[name], same[name]) for name in own)
    other = make_model(method, base, rank=3, seed=5)
    assert any(not torch.equal(own[n], p) for n, p in other.named_parameters() if n in own)


def test_weights_are_shared_and_the_base_stays_without_adapter(base: Any) -> None:
    model = make_model(SageMethod("sage-random", 0.5), base, rank=2, seed=0)
    weights = {p.data_ptr() for p in base.parameters()}
    assert {p.data_ptr() for p in model.parameters() if not p.requires_grad} <= weights
    assert not any("lora" in name for name, _ in base.named_modules())


def test_titles() -> None:
    assert [m.title for m in (SageMethod("mesp"), SageMethod("sage-value_norm", 0.125))] == [
        "MeSP",
        "SAGE, value norm, 0.125",
    ]
