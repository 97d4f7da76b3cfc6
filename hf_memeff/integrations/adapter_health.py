"""`AdapterHealthCallback`: names the adapters that do not learn, and those whose numbers have gone."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_memeff.integrations.logs import LoggingCallback, add_to_logs
from hf_memeff.integrations.trained_tensors import (
    GradientWatch,
    TrainedTensor,
    floats,
    largest_values,
    trained_tensors,
)

logger = logging.getLogger("hf_memeff")

NO_GRADIENT = "no gradient"
UNCHANGED = "unchanged weights"
NOT_FINITE_GRADIENT = "NaN or infinity in the gradient"
NOT_FINITE_WEIGHTS = "NaN or infinity in the weights"

_FIXES = {
    NO_GRADIENT: "call model.enable_input_require_grads() if reentrant checkpointing is on, and check that the forward "
    "pass uses these modules",
    UNCHANGED: "keep adapters in float32 (autocast_adapter_dtype=True), raise the learning rate, and build the "
    "optimizer after the adapter",
    NOT_FINITE_GRADIENT: "lower the learning rate, and look at the batch and at the modules named first, which are "
    "nearest to the loss",
    NOT_FINITE_WEIGHTS: "go back to an earlier checkpoint, lower the learning rate, or train in bfloat16 or float32",
}
_NARROW = (
    "AdapterHealthCallback got %d trained tensors in %s, such as %s, where small updates are lost; watch "
    "adapters/changed_share. Fix: keep adapters in float32 (autocast_adapter_dtype=True), and call .float() on the "
    "copies of modules_to_save if training runs under autocast."
)
_NAMED = 8
"""Modules that a message names; a report has all."""


@dataclass(frozen=True)
class AdapterFault:
    """What is wrong with one tensor.

    Attributes:
        module: name of the adapted module in the base model.
        adapter: name of the adapter; "" for a trained parameter of the base model.
        tensor: what it is within the module, such as "lora_A".
        problem: "no gradient", "unchanged weights", "NaN or infinity in the gradient" or "... in the weights".
        place: module and adapter, as messages have them.
    """

    module: str
    adapter: str
    tensor: str
    problem: str
    place: str


@dataclass(frozen=True)
class AdapterHealthReport:
    """One check.

    Attributes:
        step: number of the optimizer step, from 1.
        faults: what was found, in the order of the model; those of gradients that are not finite from the loss on.
        changed_share: share of the trained elements whose value the step changed; None if it was not looked at.
    """

    step: int
    faults: tuple[AdapterFault, ...]
    changed_share: float | None = None


class AdapterHealthCallback(LoggingCallback):
    """Name adapters that get no gradient, that do not move, or that hold NaN or infinity.

    Every n optimizer steps each trained tensor is judged:

    - "no gradient": its gradient was missing or zero in all n steps, all micro-batches;
    - "unchanged weights": it had a gradient, and the step changed none of its elements, as happens to bfloat16 weights
      at a small learning rate, or to a parameter that the optimizer was not given;
    - NaN or infinity in its weights.

    NaN or infinity in a gradient is found in the step where it comes up, before the optimizer uses it, and ahead of
    gradient clipping, which would spread it to all modules. In float16 training (`fp16=True`) it is the gradient
    scaler's business and not reported.

    Frozen, inactive and disabled adapters are not looked at. A factor that has no gradient because the other one is
    still zero, as LoRA's A in the first steps, is in order; so is a tensor that does not move while its learning rate
    is zero or the scaler skips the step (it is judged in the next step). Mixture-of-experts layers with a module per
    expert need an `every` in which each expert is used.

    Trained tensors in a 16-bit format are mentioned when training begins: updates below half a unit in their last place
    are lost. Findings are warned of once, kept in `self.reports`, and logged as "adapters/faulty_tensors", next to
    "adapters/changed_share", the share of trained elements whose value the step changed (see `add_to` for reporters).
    Per step this costs a norm of each trained gradient and one synchronisation; in a step that judges, a copy of the
    trained tensors while the optimizer steps.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[AdapterHealthCallback(on_fault="stop")])
        ```

    Args:
        every: optimizer steps that are judged together.
        on_fault: "warn", or "stop" to end training with a RuntimeError; for gradients that are not finite this is
            before the optimizer step, so that the weights are still good.

    Raises:
        ValueError: an argument is out of its range; when training begins, the parameters are sharded over processes.
        RuntimeError: a fault was found, with `on_fault="stop"`.
    """

    def __init__(self, every: int = 10, on_fault: str = "warn") -> None:
        if type(every) is not int or every < 1:
            raise ValueError(
                f"AdapterHealthCallback got every={every!r}, expected an integer above 0. Fix: every=10 judges ten "
                "steps together."
            )
        if on_fault not in ("warn", "stop"):
            raise ValueError(
                f"AdapterHealthCallback got on_fault={on_fault!r}, expected 'warn' or 'stop'. Fix: pass one of these."
            )
        self.every, self.on_fault = every, on_fault
        self.reports: list[AdapterHealthReport] = []
        self._gradients = GradientWatch()
        self._begun = 0
        self._before: list[tuple[TrainedTensor, Tensor]] | None = None
        self._said: set[tuple[str, str]] = set()
        self._unlogged: AdapterHealthReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start over."""
        if args.fsdp or args.deepspeed:
            raise ValueError(
                "AdapterHealthCallback got a run whose parameters are sharded over processes (FSDP or DeepSpeed), "
                "expected whole parameters in each. Fix: leave the callback out, or use it in a run on one device."
            )
        self.reports, self._unlogged, self._before, self._begun = [], None, None, state.global_step
        self._said.clear()
        self._gradients.clear()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Watch the gradients of what is trained now."""
        self._gradients.watch(trained_tensors(model))
        narrow = [tensor for tensor in self._gradients.watched if tensor.parameter.dtype.itemsize < 4]
        if narrow and not self._said:
            self._said.add((_NARROW, ""))
            dtype = str(narrow[0].parameter.dtype).removeprefix("torch.")
            logger.warning(_NARROW, len(narrow), dtype, narrow[0].place)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the gradients, and keep the weights if the step is due."""
        not_finite = self._gradients.end_step()
        if not_finite and not args.fp16:
            broken = _not_finite_weights(self._gradients.watched)
            faults = broken or [_fault(tensor, NOT_FINITE_GRADIENT) for tensor in not_finite]
            self._report(AdapterHealthReport(state.global_step + 1, tuple(faults)))
        if state.global_step + 1 - self._begun >= self.every:
            self._before = [(tensor, tensor.parameter.detach().clone()) for tensor in self._gradients.watched]

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any, **kwargs: Any
    ) -> None:
        """Judge, if the step is due."""
        if self._before is None:
            return
        before, self._before = self._before, None
        still = {p for group in optimizer.param_groups if group["lr"] == 0 for p in group["params"]}
        moving = [(tensor, weights) for tensor, weights in before if tensor.parameter not in still]
        if not moving or getattr(optimizer, "step_was_skipped", False):
            return
        counts = floats((tensor.parameter.detach() != weights).sum() for tensor, weights in moving)
        changed = {tensor: count for (tensor, _), count in zip(moving, counts, strict=True)}
        sizes = largest_values(weights for _, weights in before)
        zero = {tensor for (tensor, _), size in zip(before, sizes, strict=True) if size == 0}
        without = self._gradients.without()
        dead = [t for t, _ in before if t in without and not _waits_for_its_other_factor(t, zero, without)]
        faults = [_fault(tensor, NO_GRADIENT) for tensor in dead]
        faults += [_fault(t, UNCHANGED) for t, count in changed.items() if not count and t not in without]
        faults += _not_finite_weights(self._gradients.watched)
        share = sum(changed.values()) / max(1, sum(tensor.parameter.numel() for tensor in changed))
        self._begun = state.global_step + 1
        self._gradients.restart()
        self._report(AdapterHealthReport(self._begun, tuple(faults), share))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the latest report, once."""
        if self._unlogged is None:
            return
        values = {"adapters/faulty_tensors": float(len(self._unlogged.faults))}
        if self._unlogged.changed_share is not None:
            values["adapters/changed_share"] = self._unlogged.changed_share
        add_to_logs(state, logs, values)
        self._unlogged = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the hooks off the parameters."""
        self._gradients.clear()

    def _report(self, report: AdapterHealthReport) -> None:
        self.reports.append(report)
        self._unlogged = report
        new = [fault for fault in report.faults if (fault.place, fault.problem) not in self._said]
        self._said |= {(fault.place, fault.problem) for fault in new}
        messages = [self._message(problem, [f for f in new if f.problem == problem], report.step) for problem in _FIXES]
        messages = [message for message in messages if message]
        if messages and self.on_fault == "stop":
            self._gradients.clear()
            raise RuntimeError("\n".join(messages))
        for message in messages:
            logger.warning(message)

    def _message(self, problem: str, faults: list[AdapterFault], step: int) -> str:
        if not faults:
            return ""
        places = list(dict.fromkeys(fault.place for fault in faults))
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        return (
            f"AdapterHealthCallback got {problem} for {', '.join(places[:_NAMED])}{more} in step {step}, expected "
            f"every adapter to learn. Fix: {_FIXES[problem]}."
        )


def _fault(tensor: TrainedTensor, problem: str) -> AdapterFault:
    return AdapterFault(tensor.module, tensor.adapter, tensor.name, problem, tensor.place)


def _waits_for_its_other_factor(tensor: TrainedTensor, zero: set[TrainedTensor], without: set[TrainedTensor]) -> bool:
    """Whether another factor of the same adapter is zero and about to move: the gradient is a product with it."""
    siblings = (other for other in zero if (other.module, other.adapter) == (tensor.module, tensor.adapter))
    return any(other != tensor and other not in without for other in siblings)


def _not_finite_weights(tensors: list[TrainedTensor]) -> list[AdapterFault]:
    sizes = largest_values(tensor.parameter for tensor in tensors)
    found = zip(tensors, sizes, strict=True)
    return [_fault(tensor, NOT_FINITE_WEIGHTS) for tensor, size in found if not math.isfinite(size)]
