"""TRL's trainer for a plan, to train with or only to see what it would be fed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import TrainerCallback
from trl import DPOTrainer, SFTTrainer

from hf_memeff.recipes.parsing import RunPlan
from hf_memeff.recipes.training_data import RunData

_TRAINERS = {"sft": SFTTrainer, "dpo": DPOTrainer}


def build_trainer(
    plan: RunPlan, model: Any, tokenizer: Any, data: RunData, callbacks: Sequence[TrainerCallback] = ()
) -> Any:
    """TRL's trainer for a plan, with the adapter put on.

    Args:
        plan: the plan.
        model: the base model.
        tokenizer: of the model.
        data: checked rows.
        callbacks: for the trainer.
    """
    return _TRAINERS[plan.run.trainer](
        model=model,
        args=plan.training,
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=tokenizer,
        peft_config=plan.adapter,
        callbacks=list(callbacks),
    )


def first_batch(plan: RunPlan, model_config: Any, tokenizer: Any, data: RunData) -> str:
    """The first batch as the trainer makes it, in words; the model has no weights, only shapes.

    Args:
        plan: the plan; nothing is written to its output folder.
        model_config: config of the base model.
        tokenizer: of the model.
        data: checked rows.

    Returns:
        Names and shapes of the batch's tensors, and the text of its first row.
    """

    class WithoutDevice(type(plan.training)):  # type: ignore[misc]
        """The trainer's arguments, but a model without weights stays where it is."""

        @property
        def place_model_on_device(self) -> bool:
            return False

    fields = {item.name: getattr(plan.training, item.name) for item in dataclasses.fields(plan.training) if item.init}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
    with tempfile.TemporaryDirectory() as folder:  # the trainer creates its output folder
        training = WithoutDevice(**{**fields, "output_dir": folder})
        trainer = build_trainer(dataclasses.replace(plan, training=training), model, tokenizer, data)
        batch = next(iter(trainer.get_train_dataloader()))
    shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    lines = [f"First batch: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}", "First row of it:"]
    return "\n".join([*lines, tokenizer.decode(batch["input_ids"][0])])
