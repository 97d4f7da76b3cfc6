"""One training run, the loss on held-out rows, and the trained adapter's file."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import get_linear_schedule_with_warmup

from hf_memeff.benchmarks.comparison import timed
from hf_memeff.benchmarks.sage_text import Batch, labelled_tokens

_WARM_UP_SHARE = 0.1
_LARGEST_GRADIENT_NORM = 1.0
_TENTHS = 10


class Training:
    """AdamW without weight decay, linear warm-up and decay, gradients clipped at norm 1: Trainer's defaults.

    Args:
        model: a `PeftModel` in train mode.
        rate: highest learning rate.
        steps: optimizer steps of the schedule.

    Attributes:
        losses: one per step.
        seconds: wall time of each step.
        cpu_seconds: CPU time of this process in each step.
    """

    def __init__(self, model: Any, rate: float, steps: int) -> None:
        self.model = model
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)  # allocated before the meter starts
        self._optimizer = torch.optim.AdamW(self._parameters, lr=rate, weight_decay=0.0)
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, round(_WARM_UP_SHARE * steps), steps)

    def step(self, batch: Batch) -> None:
        """One optimizer step."""
        cpu = time.process_time()
        self.seconds.append(timed(partial(self._update, batch), "cpu"))
        self.cpu_seconds.append(time.process_time() - cpu)

    def gradients(self, batch: Batch) -> float:
        """Forward and backward; returns the loss."""
        for parameter in self._parameters:
            parameter.grad.zero_()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    def tenths(self) -> tuple[float, ...]:
        """Mean loss of each tenth of the steps so far."""
        size = max(1, len(self.losses) // _TENTHS)
        return tuple(statistics.fmean(self.losses[i : i + size]) for i in range(0, len(self.losses), size))

    def _update(self, batch: Batch) -> None:
        self.losses.append(self.gradients(batch))
        nn.utils.clip_grad_norm_(self._parameters, _LARGEST_GRADIENT_NORM)
        self._optimizer.step()
        self._schedule.step()


@torch.no_grad()
def held_out_loss(model: Any, batches: Sequence[Batch]) -> float:
    """Mean cross-entropy per labelled token over all batches, in eval mode; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        counts = [labelled_tokens(batch) for batch in batches]
        losses = [model(**batch, use_cache=False).loss.item() for batch in batches]
    finally:
        model.train(training)
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def save_adapter(model: nn.Module, path: Path) -> None:
    """Write the trained values; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        save_file(values, Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)


def load_adapter(model: nn.Module, path: Path) -> None:
    """Give a model what `save_adapter` wrote of one with the same adapter."""
    values = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values[name])
