"""TRL's SFTTrainer with its defaults: MespConfig instead of LoraConfig, and MespCallback on a LoRA model."""

import json
from itertools import combinations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from helpers import fill_adapters, run_python, tiny_model
from hf_memeff import MespCallback, MespConfig, measure_peak_memory, memeff_status
from integration._training import LORA, logged, losses, sft, texts, tokenizer, trained_weights

SCRIPT = """
import json
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
{imports}

texts = {texts!r}
trainer = SFTTrainer(
    model="{folder}/base",
    args=SFTConfig(output_dir="{folder}/out", max_steps=10, logging_steps=1, report_to="none", use_cpu=True),
    train_dataset=Dataset.from_dict({{"text": texts}}),
    peft_config={config}(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("{folder}/adapter")
print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
"""

METHODS = {"lora": (LoraConfig, None), "mesp": (MespConfig, None), "callback": (LoraConfig, MespCallback)}


def largest_difference(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) == 10
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def run(folder, method, before=None, **settings):
    """Ten steps from a filled adapter; with `before`, checkpointing is enabled on the base model by these keywords."""
    config_cls, callback = METHODS[method]
    base = tiny_model(num_hidden_layers=3)
    if before is not None:
        base.activation_checkpointing_enable(before)
        settings = {**settings, "gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    model = get_peft_model(base, config_cls(**LORA))
    fill_adapters(model)
    trainer = sft(folder, model, callbacks=[callback()] if callback else None, **settings)
    assert memeff_status(trainer.model).attached == (method != "lora")
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def lora_without_checkpointing(tmp_path_factory):
    return run(tmp_path_factory.mktemp("lora"), "lora", bf16=False, gradient_checkpointing=False)


@pytest.mark.parametrize("method", ["mesp", "callback"])
@pytest.mark.parametrize("order", ["after wrapping", "before wrapping"])
@pytest.mark.parametrize("keywords", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_ten_losses_are_lora_s_however_checkpointing_is_switched_on(
    tmp_path, lora_without_checkpointing, method, order, keywords, nothing_said
):
    with logged("hf_memeff") as ours:
        if order == "after wrapping":
            trainer = run(tmp_path, method, bf16=False, gradient_checkpointing_kwargs=keywords)
        else:
            trainer = run(tmp_path, method, before=keywords or {}, bf16=False)
    assert largest_difference(losses(trainer), losses(lora_without_checkpointing)) <= 1e-5
    expected = trained_weights(lora_without_checkpointing.model)
    for name, weight in trained_weights(trainer.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4, msg=name)
    assert [m for m in ours if "checkpointing" in m] == ours and len(ours) == 1


@pytest.mark.parametrize("method", ["mesp", "callback"])
def test_c41_eight_rows_at_once_and_two_by_four_give_equal_runs(tmp_path, method):
    """Prompts are labelled -100, so micro-batches hold uneven numbers of labels; clipping would hide a wrong scale."""
    settings = {"bf16": False, "max_grad_norm": 0.0, "learning_rate": 1e-3}
    whole = {"per_device_train_batch_size": 8}
    expected = run(tmp_path, "lora", **whole, **settings)
    for split in (whole, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        trainer = run(tmp_path, method, **split, **settings)
        assert largest_difference(losses(trainer), losses(expected)) <= 1e-5
        stock = trained_weights(expected.model)
        for name, weight in trained_weights(trainer.model).items():
            torch.testing.assert_close(weight, stock[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def lora_bf16_runs(tmp_path_factory):
    """Losses of plain LoRA with TRL's default bf16, by how the eight rows of a step are split into micro-batches."""
    folder = tmp_path_factory.mktemp("bf16")
    return [losses(run(folder, "lora", **split)) for split in micro_batches()]


def micro_batches():
    for rows in (8, 4, 2, 1):
        yield {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows, "learning_rate": 1e-3}


@pytest.mark.parametrize("method", ["mesp", "callback"])
def test_default_bf16_losses_are_as_close_as_lora_s_under_other_micro_batches(tmp_path, lora_bf16_runs, method):
    allowed = max(largest_difference(a, b) for a, b in combinations(lora_bf16_runs, 2))
    assert 0 < allowed <= 1e-3  # rounding, not another run
    found = losses(run(tmp_path, method, **next(micro_batches())))
    assert found[0] == lora_bf16_runs[0][0]  # the forward rounds as LoRA's does; gradients then differ in the last bits
    assert largest_difference(found, lora_bf16_runs[0]) <= allowed


@pytest.mark.parametrize("bf16", [True, False])
def test_peak_memory_is_below_lora_with_checkpointing(tmp_path, bf16):
    """The MLP is wide, so that blocks outweigh the tile of 32,768 columns that TRL's loss takes for any vocabulary."""
    data = Dataset.from_dict({"text": texts(2, 64, 64)})
    peaks = {}
    for method, (config_cls, callback) in METHODS.items():
        model = tiny_model(intermediate_size=8192)
        callbacks = [callback()] if callback else None
        settings = {"max_steps": 1, "per_device_train_batch_size": 1, "bf16": bf16}
        trainer = sft(tmp_path, model, config_cls(**LORA), data, callbacks, **settings)
        peaks[method] = measure_peak_memory(trainer.train, "cpu").peak_bytes
    assert peaks["mesp"] <= 0.8 * peaks["lora"] and peaks["callback"] <= 0.8 * peaks["lora"], peaks


def test_a_stock_script_changes_one_name(tmp_path):
    """The same script with LoraConfig here and with MespConfig in a process of its own, as a user runs it."""
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    values = {"folder": tmp_path, "texts": texts(80)}
    scope: dict = {}
    exec(SCRIPT.format(**values, config="LoraConfig", imports=""), scope)
    done = run_python(SCRIPT.format(**values, config="MespConfig", imports="from hf_memeff import MespConfig"))
    assert done.returncode == 0, done.stderr[-2000:]
    # nothing amplifies the rounding of bf16 at TRL's own learning rate
    assert largest_difference(losses(scope["trainer"]), json.loads(done.stdout.strip().splitlines()[-1])) <= 1e-4
    assert done.stderr.count("gradient checkpointing is on") == 1
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
