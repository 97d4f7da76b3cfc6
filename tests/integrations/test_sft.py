"""SAGE's callbacks together under TRL's SFTTrainer with its own defaults: bf16, gradient checkpointing, fused head."""

import pytest
from peft import LoraConfig

from helpers import fill_adapters, tiny_model
from hf_memeff import GradientProbeCallback, SageBudgetCallback, SageCallback
from integration._training import LORA, losses, sft, trained_weights
from integrations._training import assert_same, logged


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 48}], ids=["defaults", "packing"])
def test_annealed_and_probed_sage_runs_as_without_the_probe(tmp_path, settings):
    runs = []
    probe = GradientProbeCallback(every=5)
    for folder, probes in {"without": [], "with": [probe]}.items():
        callbacks = [SageCallback(), SageBudgetCallback(1.0, 0.2), *probes]
        trainer = sft(tmp_path / folder, tiny_model(), LoraConfig(**LORA), callbacks=callbacks, **settings)
        fill_adapters(trainer.model)
        trainer.train()
        runs.append((trained_weights(trainer.model), losses(trainer), logged(trainer, "sage/token_budget")))
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1:] == runs[0][1:] and runs[0][2][:10] == pytest.approx([1 - 0.08 * step for step in range(10)])
    assert [measured.step for measured in probe.probes] == [5, 10]
    assert all(0.3 < measured.cosine < 0.999 for measured in probe.probes)
