"""`GradientProbeCallback`: how far SAGE's gradient is from the exact one, measured while training runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_memeff.integrations.logs import LoggingCallback, add_to_logs
from hf_memeff.integrations.random_state import kept_random_state
from hf_memeff.tuners.budget import change_token_budget

Batch = Mapping[str, Any]

_LOSS_SCALE = 2.0**10
"""Factor of the probe's loss. A power of two changes neither cosine nor ratio; without it, small gradients would become
zero in float16, which Trainer scales too."""


@dataclass(frozen=True)
class GradientProbe:
    """One measurement; not a number where a gradient is zero.

    Attributes:
        step: optimizer steps done.
        cosine: cosine of SAGE's gradient to the exact one, over all trained parameters together, mean over batches.
        norm_ratio: 2-norm of SAGE's gradient by that of the exact one, likewise.
    """

    step: int
    cosine: float
    norm_ratio: float


class GradientProbeCallback(LoggingCallback):
    """Every n steps, log how well the SAGE gradient points the right way.

    On a small batch the gradient of all trained parameters is computed twice: with the token budget of that moment, and
    with budget 1, which is exactly LoRA's. The cosine of the two goes into the Trainer's logs as
    "sage/gradient_cosine", the ratio of their norms as "sage/gradient_norm_ratio", with the log entry that follows (see
    `SageBudgetCallback` for who sees it); `self.probes` has all measurements. 1 and 1 are exact; a cosine below about
    0.3 asks for a larger budget. The training run is bit for bit the one that it would be without the probe: gradients,
    random states, modes and budget are left as they were. A probe costs about five forward passes of its batch, and,
    for the exact gradient, MeSP's memory for it.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[GradientProbeCallback(every=100, rows=4)])
        ```

    Args:
        every: optimizer steps between two probes.
        batches: what to probe on: a batch as the model takes it, with labels; a list of such batches; or a dataset
            whose first rows the trainer's collator puts together. None is the training dataset.
        rows: rows taken from a dataset; None is the trainer's batch size per device. Not for batches.

    Raises:
        ValueError: an argument is out of its range; when training begins, the rows can't be had from the dataset (it is
            an iterable one, or empty), or the parameters are sharded over processes; on the first probe, the model is
            no SAGE model, or it makes no loss of the batch.
    """

    def __init__(self, every: int = 50, batches: Any = None, rows: int | None = None) -> None:
        for name, value in (("every", every), ("rows", rows)):
            if not (value is None and name == "rows") and (type(value) is not int or value < 1):
                raise ValueError(
                    f"GradientProbeCallback got {name}={value!r}, expected an integer above 0. Fix: every=50 probes "
                    "each 50 steps, rows=4 takes four rows of the dataset."
                )
        self._given = _as_batches(batches)
        if self._given is not None and rows is not None:
            raise ValueError(
                f"GradientProbeCallback got batches and also rows={rows}, expected rows with a dataset only. Fix: "
                "leave rows out, and cut the batches yourself."
            )
        self.every, self.rows = every, rows
        self.dataset = batches if self._given is None else None
        self.probes: list[GradientProbe] = []
        self._batches: list[Batch] = []
        self._unlogged: GradientProbe | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the batch together."""
        if args.fsdp or args.deepspeed:
            raise ValueError(
                "GradientProbeCallback got a run whose parameters are sharded over processes (FSDP or DeepSpeed), "
                "expected whole parameters in each. Fix: leave the callback out, or probe in a run on one device."
            )
        self.probes, self._unlogged = [], None
        if self._given is not None:
            self._batches = self._given
            return
        with kept_random_state(args.device):  # datasets and collators may draw random numbers
            self._batches = [_first_rows(self.dataset, train_dataloader, self.rows or args.per_device_train_batch_size)]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Probe, if the step is due."""
        if state.global_step % self.every == 0:
            self._unlogged = self._probe(model, state.global_step, args.device)
            self.probes.append(self._unlogged)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the latest probe, once."""
        if self._unlogged is not None:
            values = {
                "sage/gradient_cosine": self._unlogged.cosine,
                "sage/gradient_norm_ratio": self._unlogged.norm_ratio,
            }
            add_to_logs(state, logs, values)
            self._unlogged = None

    def _probe(self, model: nn.Module, step: int, device: torch.device) -> GradientProbe:
        cosines, ratios = [], []
        with _in_training(model):
            for batch in self._batches:
                batch = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.items()}
                before = change_token_budget(model, 1.0, "GradientProbeCallback")
                try:
                    exact = _gradient(model, batch, device)
                finally:
                    change_token_budget(model, before, "GradientProbeCallback")
                sage = _gradient(model, batch, device)
                sizes = sage.norm(), exact.norm()
                cosines.append((sage @ exact / (sizes[0] * sizes[1])).item())
                ratios.append((sizes[0] / sizes[1]).item())
        return GradientProbe(step, statistics.fmean(cosines), statistics.fmean(ratios))


def _as_batches(given: Any) -> list[Batch] | None:
    """The batches among what a user passes; None for a dataset, or nothing."""
    if not isinstance(given, (Mapping, list, tuple)):
        return None
    found: list[Any] = [given] if isinstance(given, Mapping) else list(given)
    for batch in found or [None]:
        tensors = [v for v in batch.values() if isinstance(v, Tensor)] if isinstance(batch, Mapping) else []
        if not any(tensor.dim() >= 2 for tensor in tensors):
            raise ValueError(
                f"GradientProbeCallback got batches with a {type(batch).__name__} without tensors of a batch, expected "
                "what the model takes, such as input_ids and labels of shape (rows, tokens). Fix: collate "
                "the rows into a batch."
            )
    return found


def _first_rows(dataset: Any, loader: DataLoader | None, rows: int) -> Batch:
    """The first rows of a dataset, put together as the trainer does; the loader's sampler isn't asked."""
    dataset = getattr(loader, "dataset", None) if dataset is None else dataset
    collate = getattr(loader, "collate_fn", None)
    if collate is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise ValueError(
            f"GradientProbeCallback got a {type(dataset).__name__} to take rows from, expected a dataset with a length "
            "and at least one row, since reading an iterable one would move the run's own data on. Fix: pass "
            "batches=, a batch as the model takes it."
        )
    return collate([dataset[row] for row in range(min(rows, len(dataset)))])


def _gradient(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """The gradient of all trained parameters, one float64 vector; `.grad` and hooks on it aren't touched."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with kept_random_state(device), torch.enable_grad():
        loss = getattr(model(**batch), "loss", None)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"GradientProbeCallback got no loss from the model for a batch of {', '.join(map(str, batch))}, "
                "expected one. Fix: pass batches= with labels."
            )
        found = torch.autograd.grad(loss * _LOSS_SCALE, parameters, allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([gradient.flatten().cpu().double() for gradient in gradients])


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Training mode where it is off; each module's mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
