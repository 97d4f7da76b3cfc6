"""The demo's training: `transformers.Trainer` on one device, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_memeff.benchmarks.comparison import timed
from hf_memeff.recipes.demo.stock_peft import TokenRow, collate

BATCH_ROWS = 4
LEARNING_RATE = 1e-3
LORA_FIELDS: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
_WARMUP_SHARE = 0.1


class OneDeviceArguments(TrainingArguments):
    """`TrainingArguments` that never count more than one GPU, since Trainer answers several with `nn.DataParallel`."""

    @property
    def n_gpu(self) -> int:
        """GPUs in use by this process: 0 or 1."""
        return min(1, super().n_gpu)


class StopAtDeadline(TrainerCallback):
    """End training when another step would pass a point in time; the steps so far are kept.

    Args:
        deadline: value of `time.monotonic` to be finished by.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.stopped_at: int | None = None
        self._step_started = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when the step began."""
        self._step_started = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop if a step as long as this one would end too late."""
        now = time.monotonic()
        if now + (now - self._step_started) > self.deadline and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_training_stop = True


@dataclass(frozen=True)
class TrainingRun:
    """What `train` did.

    Attributes:
        steps: optimizer steps that ran.
        seconds: how long they took.
        mean_loss: training loss, mean over the run.
    """

    steps: int
    seconds: float
    mean_loss: float


def seconds_per_step(model: nn.Module, rows: Sequence[TokenRow], pad_id: int, probes: int = 2) -> float:
    """Time a training step without changing the model: forward and backward on the first batches.

    Args:
        model: as for `train`.
        rows: as for `train`.
        pad_id: id to pad with.
        probes: steps to time, after one that warms up.

    Returns:
        Mean seconds per step.
    """
    device = next(model.parameters()).device

    def step(index: int) -> None:
        part = rows[index * BATCH_ROWS : (index + 1) * BATCH_ROWS]
        batch = {name: tensor.to(device) for name, tensor in collate(part, pad_id).items()}
        model(**batch, use_cache=False).loss.backward()

    step(0)
    mean = sum(timed(partial(step, index), device) for index in range(1, probes + 1)) / probes
    model.zero_grad()
    return mean


def affordable_steps(wanted: int, step_seconds: float, available_seconds: float) -> int:
    """Steps that fit into a stretch of time: at most ``wanted``, at least 1."""
    return max(1, min(wanted, int(available_seconds / step_seconds)))


def train(
    model: nn.Module,
    rows: Sequence[TokenRow],
    *,
    pad_id: int,
    steps: int,
    device: str,
    output: Path,
    deadline: float,
    say: Callable[[str], object],
) -> TrainingRun:
    """Train the adapter of a model with AdamW and a linear schedule; the loss covers the answers only.

    Args:
        model: a `PeftModel`, on its device.
        rows: training rows, drawn in a random but seeded order.
        pad_id: id to pad with.
        steps: optimizer steps of `BATCH_ROWS` rows each.
        device: "cpu", "cuda" or "mps".
        output: folder that Trainer may use; nothing is written to it.
        deadline: value of `time.monotonic` after which no step starts.
        say: called with a line of text if the deadline ended the training.

    Returns:
        What ran.
    """
    arguments = OneDeviceArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=BATCH_ROWS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=int(_WARMUP_SHARE * steps),
        weight_decay=0.0,
        logging_steps=max(1, steps // 6),
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=device == "cuda",
        use_cpu=device == "cpu",
        seed=0,
    )
    stop = StopAtDeadline(deadline)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=list(rows),
        data_collator=partial(collate, pad_id=pad_id),
        callbacks=[stop],
    )
    start = time.monotonic()
    outcome = trainer.train()
    if stop.stopped_at is not None:
        say(f"Training stopped after {stop.stopped_at} of {steps} steps: they became slower than the measured ones.")
    return TrainingRun(outcome.global_step, time.monotonic() - start, outcome.training_loss)
