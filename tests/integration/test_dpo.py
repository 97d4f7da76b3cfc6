"""TRL's DPOTrainer: the reference is the same model with its adapter switched off, or a copy of the adapter."""

import math
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from helpers import tiny_model
from hf_memeff import MespConfig, SageConfig, saved_tensor_bytes
from hf_memeff.blocks.salient import SalientCall
from integration._training import LORA, adapted, losses, texts, tokenizer


def preferences(rows=12):
    prompts, chosen, rejected = (texts(rows, 3, 12, seed) for seed in (1, 2, 3))
    return Dataset.from_list(
        [
            {"prompt": p, "chosen": " " + c, "rejected": " " + r}
            for p, c, r in zip(prompts, chosen, rejected, strict=True)
        ]
    )


def dpo(folder, model, peft_config=None, **settings):
    arguments = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        **settings,
    }
    args = DPOConfig(output_dir=str(folder), **arguments)
    return DPOTrainer(
        model=model, args=args, train_dataset=preferences(), processing_class=tokenizer(), peft_config=peft_config
    )


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("precomputed", [False, True])
def test_c31_losses_are_lora_s_from_ln_2_on(tmp_path, filled, precomputed):
    """A fresh adapter is compared with the model without it; one that the model brings, with a copy of itself."""
    runs = []
    for config_cls in (LoraConfig, MespConfig, partial(SageConfig, token_budget=1.0)):
        torch.manual_seed(0)
        model, config = (adapted(config_cls), None) if filled else (tiny_model(), config_cls(**LORA))
        trainer = dpo(tmp_path, model, config, precompute_ref_log_probs=precomputed)
        trainer.train()
        runs.append(losses(trainer))
    assert len(runs[0]) == 3 and runs[0][1] != pytest.approx(runs[0][0], abs=1e-3)
    for ours in runs[1:]:
        assert ours[0] == pytest.approx(math.log(2), abs=1e-6)
        assert ours == pytest.approx(runs[0], abs=1e-5)


@pytest.mark.parametrize("config_cls", [MespConfig, SageConfig])
def test_c31_the_reference_pass_stores_nothing(tmp_path, monkeypatch, config_cls):
    """Counted over the passes that run without gradients within a real step."""
    trainer = dpo(tmp_path, tiny_model(), config_cls(**LORA), max_steps=1)
    without_gradients, with_gradients = [], []
    base = trainer.model.get_base_model().model
    original = type(base).forward

    def measured(self, *args, **kwargs):
        result = []
        kept = saved_tensor_bytes(lambda: result.append(original(self, *args, **kwargs)))
        (with_gradients if torch.is_grad_enabled() else without_gradients).append(kept)
        return result[0]

    monkeypatch.setattr(type(base), "forward", measured)
    trainer.train()
    assert without_gradients and set(without_gradients) == {0}
    assert with_gradients and min(with_gradients) > 0


def test_sage_asks_the_rows_that_predict_the_completions(tmp_path, monkeypatch):
    """TRL hands the model labels to score, so that the choice of tokens is not left to each sequence's last one."""
    seen, masks = [], []
    choose, compute = SalientCall.choose, DPOTrainer.compute_loss

    def note(self, model, inputs, *args, **kwargs):
        masks.append(inputs["completion_mask"].bool())
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SalientCall, "choose", lambda self, *args: (seen.append(self.tokens), choose(self, *args))[1])
    monkeypatch.setattr(DPOTrainer, "compute_loss", note)
    trainer = dpo(tmp_path, tiny_model(), SageConfig(**LORA, token_budget=0.3), max_steps=1)
    seen.clear()  # the self-check's
    trainer.train()
    expected = torch.nn.functional.pad(masks[0][:, 1:], (0, 1))
    assert seen and expected.any() and all(torch.equal(tokens.predicted, expected) for tokens in seen)
