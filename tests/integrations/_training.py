"""Tiny Trainer runs that the tests of the callbacks share."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from helpers import fill_adapters, tiny_model, token_batch
from hf_memeff import memeff_status


class Watch(TrainerCallback):
    """Note whether the engine is attached while training runs."""

    def __init__(self) -> None:
        self.attached: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.attached.append(memeff_status(model).attached)


def rows(count: int = 8, length: int = 19) -> list[dict[str, Tensor]]:
    """A dataset of token rows."""
    batch = token_batch(rows=count, length=length)
    return [{name: values[row] for name, values in batch.items()} for row in range(count)]


def trainer_for(
    folder: Any,
    callbacks: list[TrainerCallback],
    config_class: type[LoraConfig] = LoraConfig,
    config: dict[str, Any] | None = None,
    data: Any = None,
    **settings: Any,
) -> Trainer:
    """A Trainer of a tiny adapted model for four steps of two rows, logging each; `settings` are its arguments."""
    fields = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **(config or {})}
    model = get_peft_model(tiny_model(), config_class(**fields))
    fill_adapters(model)
    arguments = {
        "output_dir": str(folder),
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
    data = rows() if data is None else data
    return Trainer(model, TrainingArguments(**arguments), train_dataset=data, callbacks=callbacks)


def logged(trainer: Trainer, name: str) -> list[float]:
    """All values that a run logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def trained(trainer: Trainer) -> dict[str, Tensor]:
    """The trained parameters."""
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert bit equality."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
