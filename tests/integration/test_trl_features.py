"""TRL's trainers with the features of `_trl_features`: the losses, weights and best checkpoint are LoRA's."""

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from hf_memeff import memeff_status
from integration import _trl_features as trl_features
from integration._trl_features import FEATURES, METHODS

CELLS = [(feature, kind) for feature, runs in FEATURES.items() for kind in runs]
ELSEWHERE = {"packing, bfd", "packing, wrapped", "precomputed reference of an own adapter"}
"""Features that test_cases_loss.py and test_dpo.py run for both methods in every suite."""


def runs():
    """Each cell for each method, slow where the suite need not wait for it."""
    for feature, kind in CELLS:
        for method in METHODS:
            quick = method == "mesp" and feature not in ELSEWHERE
            marks = () if quick else pytest.mark.slow
            yield pytest.param(method, feature, kind, marks=marks, id=f"{method}, {kind}, {feature}")


@pytest.mark.parametrize(("method", "feature", "kind"), runs())
def test_losses_and_weights_are_lora_s(tmp_path, method, feature, kind):
    run = FEATURES[feature][kind]
    stock = run(kind, tmp_path / "lora", LoraConfig)
    ours = run(kind, tmp_path / "ours", METHODS[method])
    assert memeff_status(ours.trainer.model).attached and not memeff_status(stock.trainer.model).attached
    assert {block.path for block in memeff_status(ours.trainer.model).blocks} == {"structured"}
    assert len(ours.losses) == 3 and ours.losses == pytest.approx(stock.losses, abs=2e-5)
    assert set(ours.weights) == set(stock.weights)
    for name, weight in ours.weights.items():
        torch.testing.assert_close(weight, stock.weights[name], rtol=1e-3, atol=2e-4, msg=name)
    if "load_best" in feature:
        best = [Path(outcome.trainer.state.best_model_checkpoint).name for outcome in (ours, stock)]
        assert best[0] == best[1] == "checkpoint-1"


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@pytest.mark.parametrize("brought", [0, 1])
def test_the_first_loss_compares_equal_policies(tmp_path, kind, brought):
    """DPO's is ln 2 and KTO's 1/2 while policy and reference are the same, whatever the reference is."""
    found = trl_features.train(kind, tmp_path, METHODS["mesp"], brought=brought)
    assert found.losses[0] == pytest.approx({"DPO": math.log(2), "KTO": 0.5}[kind], abs=1e-6)
    assert ("ref" in found.trainer.model.peft_config) == bool(brought)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_adapters_that_are_not_trained_stay_as_they_were(tmp_path, kind):
    trainer = trl_features.build(kind, tmp_path, METHODS["mesp"], brought=2)
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora_" in n and ".default." not in n}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert before and all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.requires_grad == (".default." in name) for name, parameter in after.items())


def test_the_table_has_a_figure_for_every_run():
    lines = trl_features.table(dict.fromkeys(CELLS, 1.5e-6)).splitlines()
    assert len(lines) == 2 + len(FEATURES) and sum(line.count("2e-06") for line in lines) == len(CELLS)
