"""Published cases (c): activation memory, the trainers' fused losses, adapters on the head."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer

from helpers import loss_and_gradients, tiny_model, token_batch, worst_relative_error
from hf_memeff import MespConfig, SageConfig, attach, detach, memeff_status, saved_tensor_bytes
from integration._training import LORA, adapted, completions, losses, sft, trainer

METHODS = ("config", "attach", "sage")
EXACT_SAGE = partial(SageConfig, token_budget=1.0)
OURS = (MespConfig, EXACT_SAGE)

ours = pytest.mark.parametrize("config_cls", OURS, ids=["mesp", "sage"])


def model_of(way, **settings):
    """A filled adapter under MeSP, through the config or through `attach` on a plain LoRA model, or under SAGE."""
    model = adapted({"config": MespConfig, "attach": LoraConfig, "sage": EXACT_SAGE}[way], **settings)
    if way == "attach":
        attach(model)
    return model


# C36: LoRA's activation memory

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGET_SETS = [["q_proj", "v_proj"], "all-linear", *([name] for name in TARGETS)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("targets", TARGET_SETS, ids=lambda t: t if isinstance(t, str) else "+".join(t))
def test_c36_saved_bytes_are_below_lora_s_for_every_target_set(targets, dropout):
    settings = {"target_modules": targets, "lora_dropout": dropout}
    batch = token_batch(rows=4, length=32)
    stock, mesp, *sage = (
        saved_tensor_bytes(lambda model=model: model(**batch).loss, exclude=model)
        for model in (
            adapted(**settings).train(),
            adapted(MespConfig, **settings).train(),
            *(adapted(SageConfig, token_budget=budget, **settings).train() for budget in (1.0, 0.5, 0.25)),
        )
    )
    assert mesp <= 0.3 * stock
    assert sage[0] == mesp and max(sage) < 0.6 * stock and sage[2] < sage[1]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_c36_checkpointing_adds_nothing_on_top(checkpointing):
    model, batch = adapted(MespConfig).train(), token_batch(rows=4, length=32)
    before = saved_tensor_bytes(lambda: model(**batch).loss, exclude=model)
    if checkpointing:
        model.activation_checkpointing_enable()
    assert saved_tensor_bytes(lambda: model(**batch).loss, exclude=model) == before


# C39: the trainer's fused loss and the tiled one


def fused_step(sft_trainer, inputs):
    """Loss and gradients of one training step as SFTTrainer takes it."""
    model = sft_trainer.model.train()
    loss = sft_trainer.compute_loss(model, dict(inputs))
    loss.backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


@pytest.mark.parametrize("way", METHODS)
def test_c39_trl_s_fused_loss_replaces_the_tiled_one_and_agrees_with_it(tmp_path, tiled_calls, way):
    stock = sft(tmp_path, adapted(), bf16=False)
    inputs = next(iter(stock.get_train_dataloader()))
    assert (inputs["labels"] == -100).any()
    expected = fused_step(stock, inputs)
    ours = sft(tmp_path, model_of(way), bf16=False)
    fused = fused_step(ours, inputs)
    assert not tiled_calls
    report = memeff_status(ours.model).tiled_loss
    assert report.path == "logits" and "fused loss" in report.reason
    assert abs(fused[0] - expected[0]) <= 1e-5 and worst_relative_error(fused[1], expected[1]) <= 1e-5
    # a plain training call on the same model runs in tiles, once
    plain = loss_and_gradients(ours.model, inputs)
    assert [shape[0] for shape in tiled_calls if shape[0] > 1] == [4]  # the check of the head takes one row
    assert abs(plain[0] - fused[0]) <= 1e-5 and worst_relative_error(plain[1], fused[1]) <= 1e-5


@pytest.mark.parametrize("way", METHODS)
def test_c39_detaching_leaves_trl_s_fused_head_in_place(tmp_path, way):
    built = sft(tmp_path, model_of(way), bf16=False)
    inputs = next(iter(built.get_train_dataloader()))
    expected = fused_step(built, inputs)
    detach(built.model)
    assert not memeff_status(built.model).attached
    found = fused_step(built, inputs)
    assert abs(found[0] - expected[0]) <= 1e-5 and worst_relative_error(found[1], expected[1]) <= 1e-5
    logits = built.model.eval()(input_ids=inputs["input_ids"]).logits
    assert torch.equal(logits, adapted().eval()(input_ids=inputs["input_ids"]).logits)


@pytest.mark.parametrize(
    "settings",
    [{"loss_type": "dft"}, {"packing": True}, {"packing": True, "packing_strategy": "wrapped"}, {"max_length": 8}],
    ids=str,
)
def test_c39_trl_s_other_losses_and_packing_give_lora_s_losses(tmp_path, settings):
    found = []
    for config_cls in (LoraConfig, *OURS):
        built = sft(tmp_path, adapted(config_cls), bf16=False, max_steps=3, **settings)
        built.train()
        found.append(losses(built))
    assert found[1] == pytest.approx(found[0], abs=1e-5) and len(found[0]) == 3
    assert found[2] == pytest.approx(found[0], abs=1e-5)


def test_c39_label_smoothing_in_trl_gives_lora_s_losses(tmp_path, tiled_calls):
    found = []
    for config_cls in (LoraConfig, MespConfig):
        with pytest.warns(FutureWarning, match="label_smoothing_factor"):
            built = sft(tmp_path, adapted(config_cls), bf16=False, max_steps=3, label_smoothing_factor=0.2)
        built.train()
        found.append(losses(built))
    assert found[1] == pytest.approx(found[0], abs=1e-5) and not tiled_calls


# C40: adapters on the head


@ours
@pytest.mark.parametrize("settings", [{}, {"use_liger_kernel": True}], ids=str)
def test_c40_trl_refuses_an_adapter_on_the_head(tmp_path, settings, config_cls):
    targets = ["q_proj", "lm_head"]
    assert isinstance(adapted(config_cls, target_modules=targets).get_output_embeddings(), BaseTunerLayer)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        sft(tmp_path, tiny_model(), config_cls(**{**LORA, "target_modules": targets}), **settings)


@ours
@pytest.mark.parametrize(
    "settings", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_c40_a_head_that_is_adapted_or_trained_gets_lora_s_gradients(tmp_path, tiled_calls, settings, config_cls):
    runs = []
    for used in (LoraConfig, config_cls):
        built = trainer(tmp_path, adapted(used, **settings))
        built.train()
        runs.append((losses(built), loss_and_gradients(built.model, token_batch())[1]))
    assert not tiled_calls  # the tiled loss reads the head's frozen weight
    assert memeff_status(built.model).tiled_loss.path == "logits"
    assert runs[1][0] == pytest.approx(runs[0][0], abs=1e-5)
    head = [gradient for name, gradient in runs[1][1].items() if "lm_head" in name]
    assert head and all(gradient.abs().max() > 0 for gradient in head)
    assert worst_relative_error(runs[1][1], runs[0][1]) <= 1e-3  # after four steps of Adam, which amplify rounding


def test_c40_a_trained_head_in_trl_gives_lora_s_losses(tmp_path):
    found = []
    for config_cls in (LoraConfig, MespConfig):
        model = adapted(config_cls, modules_to_save=["lm_head"])
        built = sft(tmp_path, model, data=completions(16), bf16=False, max_steps=4)
        built.train()
        found.append(losses(built))
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[0][-1] != found[0][0]
