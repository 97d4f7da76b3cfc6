"""MespCallback and SageCallback in transformers' Trainer."""

import pytest
import torch
from peft import PeftModel

from helpers import tiny_model, token_batch
from hf_memeff import MespCallback, MespConfig, SageCallback, SageConfig, memeff_status
from integrations._training import Watch, assert_same, logged, trained, trainer_for

EXACT = [MespCallback, lambda **options: SageCallback(token_budget=1.0, **options)]
BOTH = [(MespCallback, MespConfig), (SageCallback, SageConfig)]


@pytest.mark.parametrize("callback", EXACT, ids=["mesp", "sage"])
def test_a_plain_lora_run_keeps_its_losses_and_ends_detached(tmp_path, callback):
    stock = trainer_for(tmp_path / "stock", [])
    stock.train()
    watch = Watch()
    ours = trainer_for(tmp_path / "ours", [callback(), watch])
    assert memeff_status(ours.model).attached  # at the end of Trainer's own construction
    ours.train()
    assert watch.attached == [True] * 4 and not memeff_status(ours.model).attached
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-5) and len(logged(ours, "loss")) == 4
    for (name, got), (_, expected) in zip(ours.model.named_parameters(), stock.model.named_parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_sage_s_run_is_that_of_a_model_made_with_its_config(tmp_path):
    """And another one than LoRA's, since half of the tokens are left out of the backward pass."""
    attached = trainer_for(tmp_path / "a", [SageCallback(token_budget=0.5, sink_tokens=1)])
    attached.train()
    made = trainer_for(tmp_path / "b", [], config_class=SageConfig, config={"token_budget": 0.5, "sink_tokens": 1})
    made.train()
    stock = trainer_for(tmp_path / "c", [])
    stock.train()
    assert_same(trained(attached), trained(made))
    assert logged(attached, "loss")[0] == pytest.approx(logged(stock, "loss")[0], abs=1e-6)
    assert any(not torch.allclose(p, trained(stock)[n], atol=1e-4) for n, p in trained(attached).items())


@pytest.mark.parametrize("callback", [MespCallback, SageCallback])
def test_checkpoints_are_plain_lora(tmp_path, callback):
    trainer = trainer_for(tmp_path, [callback()], save_strategy="steps", save_steps=4)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    assert not (folder / "memeff_config.json").exists()
    again = PeftModel.from_pretrained(tiny_model(), folder).eval()
    ids = token_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("callback", [MespCallback, SageCallback])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, callback):
    whole = trainer_for(tmp_path / "whole", [callback()], save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer_for(tmp_path / "resumed", [callback()])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(trained(resumed), trained(whole))
    assert logged(resumed, "loss") == logged(whole, "loss")


@pytest.mark.parametrize("callback", [MespCallback, SageCallback])
def test_a_second_train_is_attached_again(tmp_path, callback):
    watch = Watch()
    trainer = trainer_for(tmp_path, [callback(), watch], max_steps=2)
    trainer.train()
    trainer.train()
    assert watch.attached == [True] * 4 and not memeff_status(trainer.model).attached


@pytest.mark.parametrize(("callback", "config_class"), BOTH)
def test_options_reach_the_engine(tmp_path, callback, config_class):
    trainer = trainer_for(tmp_path, [callback(tiled_loss="never")])
    assert memeff_status(trainer.model).tiled_loss.path == "logits"
    trainer = trainer_for(tmp_path, [callback(config_class(activation_store="cpu"))])
    assert memeff_status(trainer.model).activation_store == "cpu"


@pytest.mark.parametrize(("callback", "config_class"), BOTH)
def test_what_attach_refuses_stops_before_training(tmp_path, callback, config_class):
    with pytest.raises(ValueError, match="attach got r=32"):
        trainer_for(tmp_path, [callback(r=32)])
    for made_with in (MespConfig, SageConfig):
        message = rf"got a model made with {made_with.__name__}, which is attached.*Fix: leave the callback out"
        with pytest.raises(ValueError, match=message):
            trainer_for(tmp_path, [callback()], config_class=made_with)
    with pytest.raises(ValueError, match="got tiled_loss"):
        callback(tiled_loss="x")
    with pytest.raises(ValueError, match=r"got a config and also strict, expected one of the two.*Fix: "):
        callback(config_class(), strict=True)


def test_another_method_s_config_is_refused():
    with pytest.raises(ValueError, match=r"MespCallback got a SageConfig, expected a MespConfig\. Fix: "):
        MespCallback(SageConfig())
    with pytest.raises(ValueError, match=r"SageCallback got a MespConfig, expected a SageConfig\. Fix: "):
        SageCallback(MespConfig())


@pytest.mark.parametrize("config_class", [MespConfig, SageConfig])
def test_a_model_of_ours_stays_attached_after_the_run(tmp_path, config_class):
    trainer = trainer_for(tmp_path, [], config_class=config_class)
    trainer.train()
    assert memeff_status(trainer.model).attached
