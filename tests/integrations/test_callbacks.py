"""MespCallback in transformers' Trainer."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from helpers import fill_adapters, tiny_model, token_batch
from hf_memeff import MespCallback, MespConfig, memeff_status


class Watch(TrainerCallback):
    """Note whether the engine is attached while training runs."""

    def __init__(self):
        self.attached = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.attached.append(memeff_status(model).attached)


def data(rows=8):
    batch = token_batch(rows=rows)
    return [{name: values[row] for name, values in batch.items()} for row in range(rows)]


def trainer_for(tmp_path, callbacks, config_cls=LoraConfig, **settings):
    model = get_peft_model(tiny_model(), config_cls(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    fill_adapters(model)
    arguments = {
        "output_dir": str(tmp_path),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        **settings,
    }
    return Trainer(model, TrainingArguments(**arguments), train_dataset=data(), callbacks=callbacks)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_plain_lora_run_keeps_its_losses_and_ends_detached(tmp_path):
    stock = trainer_for(tmp_path / "stock", [])
    stock.train()
    watch = Watch()
    ours = trainer_for(tmp_path / "ours", [MespCallback(), watch])
    assert memeff_status(ours.model).attached  # at the end of Trainer's own construction
    ours.train()
    assert watch.attached == [True] * 4 and not memeff_status(ours.model).attached
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-5) and len(losses(ours)) == 4
    for (name, got), (_, expected) in zip(ours.model.named_parameters(), stock.model.named_parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_checkpoints_are_plain_lora(tmp_path):
    trainer = trainer_for(tmp_path, [MespCallback()], save_strategy="steps", save_steps=4)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    assert not (folder / "memeff_config.json").exists()
    again = PeftModel.from_pretrained(tiny_model(), folder).eval()
    ids = token_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def test_a_second_train_is_attached_again(tmp_path):
    watch = Watch()
    trainer = trainer_for(tmp_path, [MespCallback(), watch], max_steps=2)
    trainer.train()
    trainer.train()
    assert watch.attached == [True] * 4 and not memeff_status(trainer.model).attached


def test_options_reach_the_engine(tmp_path):
    trainer = trainer_for(tmp_path, [MespCallback(tiled_loss="never")])
    assert memeff_status(trainer.model).tiled_loss.path == "logits"
    trainer = trainer_for(tmp_path, [MespCallback(MespConfig(activation_store="cpu"))])
    assert memeff_status(trainer.model).activation_store == "cpu"


def test_what_attach_refuses_stops_before_training(tmp_path):
    with pytest.raises(ValueError, match="attach got r=32"):
        trainer_for(tmp_path, [MespCallback(r=32)])
    with pytest.raises(ValueError, match=r"got a model made with MespConfig.*Fix: leave the callback out"):
        trainer_for(tmp_path, [MespCallback()], config_cls=MespConfig)
    with pytest.raises(ValueError, match="got tiled_loss"):
        MespCallback(tiled_loss="x")
    with pytest.raises(ValueError, match=r"got a config and also strict, expected one of the two.*Fix: "):
        MespCallback(MespConfig(), strict=True)


def test_a_mesp_model_stays_attached_after_the_run(tmp_path):
    trainer = trainer_for(tmp_path, [], config_cls=MespConfig)
    trainer.train()
    assert memeff_status(trainer.model).attached
