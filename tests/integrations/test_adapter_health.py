"""AdapterHealthCallback: it names what does not learn, and is silent where all is well."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

from helpers import adapted_model, fill_adapters, tiny_model
from hf_memeff import AdapterHealthCallback, MespCallback, MespConfig, SageConfig
from hf_memeff.integrations.trained_tensors import GradientWatch, largest_values, trained_tensors
from integration._training import LORA, sft
from integration._training import trainer as train_with
from integrations._training import assert_same, logged, trained, trainer_for

BASES = {"lora": LoraConfig, "mesp": MespConfig, "sage": SageConfig}
ALL_LINEAR = 28
"""Tensors of two blocks with seven linear layers each."""


def fresh(config_class=MespConfig, **settings):
    """A tiny model with an adapter as PEFT makes it: B is zero."""
    return get_peft_model(tiny_model(settings.pop("family", "llama")), config_class(**{**LORA, **settings}))


def run(folder, model, every=1, on_fault="warn", before=(), **settings):
    """Train and return the callback; `before` are callbacks in front of it."""
    callback = AdapterHealthCallback(every=every, on_fault=on_fault)
    train_with(folder, model, callbacks=[*before, callback], **settings).train()
    return callback


def problems(report):
    """Problem and place of each fault of a report."""
    return {(fault.problem, fault.module, fault.adapter, fault.tensor) for fault in report.faults}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("config_class", [MespConfig, SageConfig])
def test_a_fresh_adapter_is_no_alarm(tmp_path, caplog, config_class, warmup, accumulation):
    """A has no gradient in step 1, where B is zero; with warm-up nothing moves in step 1 at all."""
    settings = {"gradient_accumulation_steps": accumulation, "warmup_steps": warmup, "max_steps": 3}
    with caplog.at_level(logging.WARNING, "hf_memeff"):
        callback = run(tmp_path, fresh(config_class), lr_scheduler_type="linear", **settings)
    assert [report.step for report in callback.reports] == ([1, 2, 3] if not warmup else [2, 3])
    assert not any(report.faults for report in callback.reports) and not caplog.messages
    shares = [report.changed_share for report in callback.reports]
    assert 0.2 < shares[0] < 0.8 < shares[-1] <= 1  # B alone, then all


def test_the_zero_factor_is_named_if_it_does_not_move_either(tmp_path):
    model = fresh(target_modules=["q_proj"])
    callback = run(tmp_path, model, before=[DropGradients("layers.1.self_attn.q_proj.lora_B")], max_steps=1)
    place = "model.layers.1.self_attn.q_proj"
    assert problems(callback.reports[0]) == {("no gradient", place, "default", name) for name in ("lora_A", "lora_B")}


class DropGradients(TrainerCallback):
    """Set the gradients of some parameters to zero as backward makes them, as a module does that is not used."""

    def __init__(self, part):
        self.part = part

    def on_train_begin(self, args, state, control, model, **kwargs):
        for name, parameter in model.named_parameters():
            if self.part in name and parameter.requires_grad:
                parameter.register_hook(torch.zeros_like)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("on_fault", ["warn", "stop"])
def test_c02_reentrant_checkpointing_without_gradients_of_the_embeddings(tmp_path, caplog, base, on_fault):
    """LoRA's loss falls, since the head is trained, and no adapter moves; MeSP and SAGE train them all the same."""
    torch.manual_seed(0)
    model = fresh(BASES[base], modules_to_save=["lm_head"])
    settings = {"activation_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}

    class NoHook(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.disable_input_require_grads()

    arguments = {"every": 2, "on_fault": on_fault, "before": [NoHook()], "max_steps": 4, **settings}
    if base == "lora" and on_fault == "stop":
        with pytest.raises(
            RuntimeError, match=r"got no gradient for model\.layers\.0\.self_attn\.q_proj \(default\), "
        ):
            run(tmp_path, model, **arguments)
        return
    with caplog.at_level(logging.WARNING, "hf_memeff"):
        callback = run(tmp_path, model, **arguments)
    assert [report.step for report in callback.reports] == [2, 4]
    about_health = [message for message in caplog.messages if "AdapterHealthCallback" in message]
    if base != "lora":
        assert not any(report.faults for report in callback.reports) and not about_health
        return
    dead = {(p.module, p.name) for p in trained_tensors(model) if p.name in ("lora_A", "lora_B")}
    found = [(fault.module, fault.tensor) for fault in callback.reports[1].faults]
    assert len(found) == ALL_LINEAR and set(found) == dead
    assert {fault.problem for fault in callback.reports[1].faults} == {"no gradient"}
    assert len(about_health) == 1 and "and 6 more in step 2" in about_health[0]
    assert "Fix: call model.enable_input_require_grads()" in about_health[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_c18_bfloat16_weights_that_a_small_learning_rate_does_not_move(tmp_path, caplog, dtype):
    torch.manual_seed(0)
    model = get_peft_model(
        tiny_model(dtype=torch.bfloat16), MespConfig(**LORA), autocast_adapter_dtype=dtype == torch.float32
    )
    fill_adapters(model, std=1.0)
    with caplog.at_level(logging.WARNING, "hf_memeff"):
        callback = run(tmp_path, model, every=2, learning_rate=1e-6, max_steps=2, lr_scheduler_type="constant")
    (report,) = callback.reports
    if dtype == torch.float32:
        assert report.changed_share > 0.9 and not report.faults and not caplog.messages
    else:
        assert report.changed_share < 0.05 and "unchanged weights" in {fault.problem for fault in report.faults}
        assert (
            f"got {ALL_LINEAR} trained tensors in bfloat16, such as model.layers.0.self_attn.q_proj (default),"
            in caplog.messages[0]
        )
        assert "Fix: keep adapters in float32 (autocast_adapter_dtype=True), raise" in caplog.messages[1]
        assert len(caplog.messages) == 2


def test_a_parameter_that_the_optimizer_was_not_given_does_not_move(tmp_path):
    model = fresh(target_modules=["q_proj", "v_proj"])
    fill_adapters(model)
    given = [p for n, p in model.named_parameters() if p.requires_grad and "layers.0.self_attn.v_proj" not in n]
    callback = AdapterHealthCallback(every=1)
    trainer = train_with(tmp_path, model, callbacks=[callback], max_steps=1)
    trainer.optimizer = torch.optim.SGD(given, lr=0.1)
    trainer.train()
    place = "model.layers.0.self_attn.v_proj", "default"
    assert problems(callback.reports[0]) == {("unchanged weights", *place, name) for name in ("lora_A", "lora_B")}


@pytest.mark.parametrize("on_fault", ["warn", "stop"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_c17_the_first_gradient_that_is_not_finite_is_named_before_it_reaches_the_weights(
    tmp_path, caplog, value, on_fault
):
    """Clipping would have made every module's gradient NaN by the time that the optimizer steps."""

    class Poison(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.calls = 0
            name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.default"
            model.get_submodule(name).weight.register_hook(self.spoil)

        def spoil(self, gradient):
            self.calls += 1
            return gradient * value if self.calls == 3 else gradient  # the first micro-batch of step 2

    model = fresh()
    fill_adapters(model)
    weights = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            weights.update({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})

    arguments = {"every": 10, "before": [Poison(), Keep()], "gradient_accumulation_steps": 2, "max_steps": 3}
    message = r"got NaN or infinity in the gradient for model\.layers\.1\.mlp\.up_proj \(default\) in step 2"
    if on_fault == "stop":
        with pytest.raises(RuntimeError, match=message):
            run(tmp_path, model, on_fault="stop", **arguments)
        now = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert_same(now, weights)
        assert all(p.isfinite().all() for p in now.values())
        assert not any(p._post_accumulate_grad_hooks for p in now.values())
        return
    with caplog.at_level(logging.WARNING, "hf_memeff"):
        callback = run(tmp_path, model, **arguments)
    first, second = callback.reports
    assert (first.step, [fault.tensor for fault in first.faults]) == (2, ["lora_A"])
    # clipping divides by the norm of all: NaN makes NaN of every gradient, infinity makes zeros of the finite ones
    assert (second.step, len(second.faults)) == (3, ALL_LINEAR if math.isnan(value) else 1)
    assert {fault.problem for fault in second.faults} == {"NaN or infinity in the weights"}
    assert len(caplog.messages) == 2


def test_weights_that_are_not_finite_are_named_and_not_the_gradients_that_follow(tmp_path):
    model = fresh()
    fill_adapters(model)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight")[0, 0] = float("nan")
    with pytest.raises(
        RuntimeError, match=r"infinity in the weights for model\.layers\.0\.mlp\.down_proj \(default\) in"
    ):
        run(tmp_path, model, every=10, on_fault="stop")


def test_the_gradient_scaler_s_infinities_are_not_reported():
    callback = AdapterHealthCallback(every=1)
    parameter = nn.Parameter(torch.ones(3))
    model = nn.ParameterDict({"weight": parameter})
    state = SimpleNamespace(global_step=0)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1, "params": [parameter]}], step_was_skipped=True)
    for fp16 in (True, False):
        arguments = SimpleNamespace(fp16=fp16, fsdp=None, deepspeed=None)
        callback.on_train_begin(arguments, state, None)
        callback.on_step_begin(arguments, state, None, model)
        (parameter * float("inf")).sum().backward()
        callback.on_pre_optimizer_step(arguments, state, None)
        callback.on_optimizer_step(arguments, state, None, optimizer=optimizer)
        assert [fault.problem for report in callback.reports for fault in report.faults] == (
            [] if fp16 else ["NaN or infinity in the gradient"]
        )


def test_frozen_inactive_and_disabled_adapters_are_not_looked_at(tmp_path):
    model = fresh(target_modules=["q_proj", "v_proj"])
    fill_adapters(model)
    model.add_adapter("second", MespConfig(**{**LORA, "target_modules": ["q_proj", "v_proj"]}))
    everything = trained_tensors(model)
    assert len(everything) == 8 and {tensor.adapter for tensor in everything} == {"default"}
    for name, parameter in model.named_parameters():
        if "second" in name or "layers.0" in name:
            parameter.requires_grad_("second" in name)  # inactive, yet it would take a gradient
    assert [tensor.module for tensor in trained_tensors(model)] == [
        f"model.layers.1.self_attn.{name}" for name in ("q_proj", "q_proj", "v_proj", "v_proj")
    ]
    callback = run(tmp_path, model, max_steps=2)
    assert len(callback.reports) == 2 and not any(report.faults for report in callback.reports)
    with model.disable_adapter():
        assert trained_tensors(model) == []


def test_all_that_is_trained_is_found_by_module():
    model = fresh(
        modules_to_save=["lm_head"], trainable_token_indices=[3, 4], use_dora=True, bias="all", family="qwen2"
    )
    found = {(tensor.module, tensor.adapter, tensor.name) for tensor in trained_tensors(model)}
    assert len(found) == sum(parameter.requires_grad for parameter in model.parameters())
    assert {
        ("lm_head", "default", "modules_to_save"),
        ("model.layers.0.mlp.up_proj", "default", "lora_magnitude_vector"),
        ("model.layers.1.self_attn.q_proj.base_layer", "", "bias"),
    } <= found
    assert any(adapter == "default" and name == "trainable_tokens_delta" for _, adapter, name in found)


def test_the_run_is_bit_for_bit_the_one_without_it_and_ends_without_hooks(tmp_path):
    runs = []
    for folder, callbacks in {"without": [], "with": [AdapterHealthCallback(every=2)]}.items():
        trainer = trainer_for(tmp_path / folder, [MespCallback(), *callbacks], gradient_accumulation_steps=2)
        trainer.train()
        runs.append((trained(trainer), logged(trainer, "loss")))
        assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1]
    assert logged(trainer, "adapters/faulty_tensors") == [0, 0]
    assert logged(trainer, "adapters/changed_share") == [report.changed_share for report in callbacks[0].reports]


def test_a_second_run_starts_over(tmp_path):
    callback = AdapterHealthCallback(every=2)
    trainer = trainer_for(tmp_path, [callback], max_steps=3)
    for _ in range(2):
        trainer.train()
        assert [report.step for report in callback.reports] == [2]


def test_trl_s_trainer_with_its_own_defaults(tmp_path):
    callback = AdapterHealthCallback(every=2, on_fault="stop")
    sft(tmp_path, tiny_model(), MespConfig(**LORA), callbacks=[callback], max_steps=4).train()
    assert [(report.step, report.faults) for report in callback.reports] == [(2, ()), (4, ())]


def test_gradients_are_watched_over_micro_batches_and_steps():
    parameter, empty = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0))
    nothing, tensor = trained_tensors(nn.ParameterDict({"a": empty, "b": parameter}))
    watch = GradientWatch()
    watch.watch([tensor, nothing])
    for factor in (0.0, float("nan"), 1.0):
        (parameter * factor).sum().backward()
    assert watch.end_step() == [tensor] and watch.end_step() == [] and watch.without() == {nothing}
    watch.restart()
    assert watch.without() == {tensor, nothing}
    watch.clear()
    (parameter * 2).sum().backward()
    assert watch.end_step() == []
    assert largest_values([parameter.detach() - 3, empty]) == [3, 0]


def test_sharded_parameters_and_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"every=0, expected an integer above 0\. Fix: "):
        AdapterHealthCallback(every=0)
    with pytest.raises(ValueError, match=r"on_fault='raise', expected 'warn' or 'stop'\. Fix: "):
        AdapterHealthCallback(on_fault="raise")
    arguments = SimpleNamespace(fsdp=["full_shard"], deepspeed=None)
    with pytest.raises(ValueError, match=r"sharded over processes.*Fix: "):
        AdapterHealthCallback().on_train_begin(arguments, SimpleNamespace(global_step=0), None)


def test_the_base_model_s_names_are_used_whatever_the_wrapping():
    names = {tensor.module for tensor in trained_tensors(adapted_model(target_modules=["q_proj"]))}
    assert names == {f"model.layers.{index}.self_attn.q_proj" for index in range(2)}
