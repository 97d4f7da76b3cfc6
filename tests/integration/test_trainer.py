"""transformers.Trainer, where the tiled loss acts: losses, accumulation, other losses, resuming, evaluation."""

import json
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import TrainerCallback

from helpers import tiny_model, token_batch
from hf_memeff import MespCallback, MespConfig, SageConfig, memeff_status
from integration._training import adapted, logged, losses, rows_with_uneven_labels, trained_weights, trainer

METHODS = {"mesp": (MespConfig, []), "callback": (LoraConfig, [MespCallback])}
WITH_SAGE = {**METHODS, "sage": (partial(SageConfig, token_budget=1.0), [])}


def train(folder, method="lora", base=None, resume=None, **settings):
    """Train a filled adapter and return the trainer."""
    config_cls, callbacks = METHODS.get(method, (LoraConfig, []))
    built = trainer(folder, adapted(config_cls, base), callbacks=[callback() for callback in callbacks], **settings)
    built.train(resume_from_checkpoint=resume)
    return built


def assert_same_run(got, expected, tolerance=1e-5):
    assert losses(got) == pytest.approx(losses(expected), abs=tolerance) and losses(got)
    weights = trained_weights(expected.model)
    for name, weight in trained_weights(got.model).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4, msg=name)


# accumulation


class Gradients(TrainerCallback):
    """Keep the gradients that the first optimizer step sees."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.found:
            self.found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def step_of_eight_rows(folder, config_cls, rows, steps, callback=None):
    gradients = Gradients()
    callbacks = [gradients, *([callback()] if callback else [])]
    settings = {"max_steps": 2, "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
    # clipping would hide a wrong scale
    built = trainer(folder, adapted(config_cls), callbacks=callbacks, max_grad_norm=0.0, **settings)
    built.train()
    return built, gradients.found


@pytest.mark.parametrize("method", WITH_SAGE)
def test_c41_eight_rows_at_once_and_two_by_four_give_equal_gradients(tmp_path, tiled_calls, method):
    config_cls, callbacks = WITH_SAGE[method]
    stock, expected = step_of_eight_rows(tmp_path, LoraConfig, 8, 1)
    assert not tiled_calls
    for rows, steps in ((8, 1), (2, 4)):
        tiled_calls.clear()
        built, found = step_of_eight_rows(tmp_path, config_cls, rows, steps, *callbacks)
        assert len([shape for shape in tiled_calls if shape[0] == rows]) == 2 * steps
        assert set(found) == set(expected) and len(found) == 28
        for name, gradient in found.items():
            assert (gradient - expected[name]).abs().max() <= 1e-5, name
            assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
        assert_same_run(built, stock)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_nothing_and_is_mentioned_once(tmp_path, method, nothing_said):
    with logged("hf_memeff") as messages:
        built = train(tmp_path, method, gradient_checkpointing=True)
    assert_same_run(built, train(tmp_path))
    assert len(messages) == 1 and "checkpointing" in messages[0] and "cache" in messages[0]


@pytest.mark.parametrize("method", METHODS)
def test_bf16_autocast_rounds_the_tiled_loss_as_lora_s(tmp_path, tiled_calls, method):
    settings = {"bf16": True, "learning_rate": 1e-3}
    stock, built = train(tmp_path, **settings), train(tmp_path, method, **settings)
    assert [shape[0] for shape in tiled_calls if shape[0] > 1] == [2] * 4
    assert losses(built)[0] == pytest.approx(losses(stock)[0], abs=1e-6)
    assert losses(built) == pytest.approx(losses(stock), abs=1e-3)  # later steps follow gradients rounded to bf16


# other losses


def test_label_smoothing_is_lora_s_and_gets_its_logits(tmp_path, tiled_calls):
    stock = train(tmp_path, label_smoothing_factor=0.2)
    assert losses(stock) != pytest.approx(losses(train(tmp_path)), abs=1e-3)
    for method in METHODS:
        assert_same_run(train(tmp_path, method, label_smoothing_factor=0.2), stock)
    assert not tiled_calls


def test_compute_loss_func_gets_its_logits(tmp_path, tiled_calls):
    def twice_the_loss(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1], labels[:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return 2 * total / num_items_in_batch

    stock = train(tmp_path, compute_loss_func=twice_the_loss)
    for method in METHODS:
        assert_same_run(train(tmp_path, method, compute_loss_func=twice_the_loss), stock)
    assert not tiled_calls


def test_a_model_with_a_loss_function_of_its_own_is_not_tiled_and_says_so_once(tmp_path, tiled_calls, nothing_said):

    def squared(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        return logits.float().square().mean() / num_items_in_batch

    found = []
    with logged("hf_memeff") as messages:
        for method in ("lora", "mesp"):
            base = tiny_model()
            base.loss_function = squared
            found.append(train(tmp_path, method, base))
    assert_same_run(found[1], found[0])
    assert not tiled_calls and len(messages) == 1 and "a loss function of its own" in messages[0]
    assert memeff_status(found[1].model).tiled_loss.path == "logits"


def test_evaluation_keeps_its_logits_for_compute_metrics(tmp_path, tiled_calls):
    data = rows_with_uneven_labels()
    found = []
    for method in ("lora", "mesp"):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": data, "compute_metrics": count_right}
        built = train(tmp_path, method, **settings)
        found.append(
            [{k: e[k] for k in ("eval_loss", "eval_right")} for e in built.state.log_history if "eval_loss" in e]
        )
    assert [shape[0] for shape in tiled_calls if shape[0] > 1] == [2] * 4  # training steps; evaluation takes 8 rows
    assert len(found[0]) == 2 and [e["eval_right"] for e in found[1]] == [e["eval_right"] for e in found[0]]
    assert [e["eval_loss"] for e in found[1]] == pytest.approx([e["eval_loss"] for e in found[0]], abs=1e-5)


def count_right(prediction):
    assert prediction.predictions.shape[-1] == 128
    return {"right": int((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).sum())}


# resuming


RESUMED = {
    **METHODS,
    "sage": (SageConfig, []),
    "sage, random": (partial(SageConfig, saliency="random", token_budget=0.3, dense_layers=()), []),
}
"""Sparse: what is kept in a step must not depend on the steps before."""


@pytest.mark.parametrize("method", RESUMED)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_c42_resuming_continues_with_the_losses_of_an_uninterrupted_run(tmp_path, method, dropout):
    config_cls, callbacks = RESUMED[method]

    def build(folder, **settings):
        model = adapted(config_cls, lora_dropout=dropout)
        own = [callback() for callback in callbacks]
        return trainer(
            folder, model, callbacks=own, save_strategy="steps", save_steps=2, lr_scheduler_type="linear", **settings
        )

    whole = build(tmp_path / "whole")
    whole.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    first = build(tmp_path / "parts")
    first.add_callback(Stop())
    first.train()
    assert first.state.global_step == 2
    second = build(tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole) and len(losses(second)) == 4
    for name, weight in trained_weights(second.model).items():
        assert torch.equal(weight, trained_weights(whole.model)[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_are_plain_lora(tmp_path, method):
    built = train(tmp_path, method, save_strategy="steps", save_steps=4)
    folder = tmp_path / "checkpoint-4"
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (folder / "memeff_config.json").exists() == (method == "mesp")
    again = PeftModel.from_pretrained(tiny_model(), folder).eval()
    assert type(again.peft_config["default"]) is LoraConfig
    ids = token_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, built.model.eval()(input_ids=ids).logits)
    # a LoRA run resumes from the checkpoint of ours
    resumed = train(tmp_path, "lora", resume=str(folder), max_steps=6)
    assert resumed.state.global_step == 6 and len(losses(resumed)) == 6
