"""One device, a time limit that holds, and a probe that leaves no trace."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_memeff.benchmarks.comparison import EXACT_METHODS, METHODS, wrap
from hf_memeff.recipes.demo.stock_peft import TokenRow, answer_loss
from hf_memeff.recipes.demo.training import (
    LORA_FIELDS,
    OneDeviceArguments,
    StopAtDeadline,
    affordable_steps,
    seconds_per_step,
    train,
)
from hf_memeff.recipes.model_source import find_smollm2, load_model

ROWS = [TokenRow([5, 6, 7 + index % 3], [30 + index % 3, 9, 0]) for index in range(24)]


def _train(model, tmp_path: Path, steps: int, deadline: float, lines: list[str]):
    return train(
        model,
        ROWS,
        pad_id=0,
        steps=steps,
        device="cpu",
        output=tmp_path,
        deadline=deadline,
        say=lines.append,
    )


def test_several_gpus_never_become_data_parallel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))
    assert OneDeviceArguments(output_dir=str(tmp_path), use_cpu=True).n_gpu == 1
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 0))
    assert OneDeviceArguments(output_dir=str(tmp_path), use_cpu=True).n_gpu == 0


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss_and_writes_nothing(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    model = wrap(load_model(find_smollm2(str(tiny_folder))), method, **LORA_FIELDS)
    before, _ = answer_loss(model.eval(), ROWS, pad_id=0)
    lines: list[str] = []
    run = _train(model.train(), tmp_path, steps=12, deadline=time.monotonic() + 600, lines=lines)
    after, _ = answer_loss(model.eval(), ROWS, pad_id=0)
    assert after < before - 0.02
    assert (run.steps, lines, list(tmp_path.iterdir())) == (12, [], [])
    assert run.seconds > 0


def test_the_exact_methods_train_alike(tiny_folder: Path, tmp_path: Path) -> None:
    losses = []
    for method in EXACT_METHODS:
        model = wrap(load_model(find_smollm2(str(tiny_folder))), method, **LORA_FIELDS)
        losses.append(_train(model, tmp_path, steps=4, deadline=time.monotonic() + 600, lines=[]).mean_loss)
    assert losses == pytest.approx([losses[0]] * len(EXACT_METHODS), rel=1e-5)


def test_training_ends_at_the_deadline_and_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    model = wrap(load_model(find_smollm2(str(tiny_folder))), "mesp", **LORA_FIELDS)
    lines: list[str] = []
    run = _train(model, tmp_path, steps=1000, deadline=time.monotonic() + 1.0, lines=lines)
    assert 1 <= run.steps < 1000
    assert lines == [f"Training stopped after {run.steps} of 1000 steps: they became slower than the measured ones."]


def test_the_last_step_is_not_reported_as_a_stop(tmp_path: Path) -> None:
    stop, control = StopAtDeadline(deadline=0.0), TrainerControl()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    stop.on_step_begin(arguments, TrainerState(), control)
    stop.on_step_end(arguments, TrainerState(global_step=5, max_steps=5), control)
    assert stop.stopped_at is None
    stop.on_step_end(arguments, TrainerState(global_step=4, max_steps=5), control)
    assert stop.stopped_at == 4
    assert control.should_training_stop


def test_the_probe_measures_time_and_leaves_no_trace(tiny_folder: Path) -> None:
    model = wrap(load_model(find_smollm2(str(tiny_folder))), "mesp", **LORA_FIELDS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert 0 < seconds_per_step(model, ROWS, pad_id=0) < 60
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("wanted", "step_seconds", "available", "expected"),
    [(48, 2.0, 1000.0, 48), (48, 2.0, 50.0, 25), (48, 2.0, 1.0, 1), (48, 2.0, -5.0, 1), (1, 9.0, 100.0, 1)],
)
def test_affordable_steps(wanted: int, step_seconds: float, available: float, expected: int) -> None:
    assert affordable_steps(wanted, step_seconds, available) == expected
