"""SAGE's callbacks together under TRL's SFTTrainer with its own defaults: bf16, gradient checkpointing, fused head."""

import pytest
from peft import LoraConfig

from helpers import fill_adapters, tiny_model
from hf_memeff import GradientProbeCallback, SageBudgetCallback, SageCallback, SageConfig
from hf_memeff.blocks.batch_tokens import BatchTokens
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


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 48}], ids=["defaults", "packing"])
def test_likely_losses_find_the_labels_under_trl_s_fused_head(tmp_path, settings, monkeypatch):
    found = []
    own = BatchTokens.likely_loss

    def noted(self, hidden):
        found.append((own(self, hidden), self.targets))
        return found[-1][0]

    monkeypatch.setattr(BatchTokens, "likely_loss", noted)
    config = SageConfig(**LORA, token_budget=0.3, saliency="loss", sink_tokens=1, dense_layers=())
    trainer = sft(tmp_path, tiny_model(), config, max_steps=1, **settings)
    found.clear()  # the self-check's
    trainer.train()
    assert len(found) == 2
    for scores, targets in found:
        assert (targets != -100).any() and ((scores > 0) == (targets != -100)).all()
