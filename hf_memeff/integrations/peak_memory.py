"""`PeakMemoryCallback`: what a training step needs at its peak, in the Trainer's logs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_memeff.integrations.logs import LoggingCallback, add_to_logs
from hf_memeff.integrations.step_memory import StepMeter, StepPeaks
from hf_memeff.memory import profiler_in_use

logger = logging.getLogger("hf_memeff")

_GIB = 2**30


@dataclass(frozen=True)
class PeakMemoryStep:
    """One measured step.

    Attributes:
        step: number of the optimizer step, from 1.
        peaks: by device, such as "cpu" or "cuda:0"; None where nothing could be measured.
        reason: why not; "" if it was.
    """

    step: int
    peaks: dict[str, StepPeaks] | None
    reason: str = ""


class PeakMemoryCallback(LoggingCallback):
    """Every n optimizer steps, log the peak memory of the step and of its phases.

    Into the log entry that follows go, in GiB (2**30 bytes) above what was allocated when the step began, as
    `measure_peak_memory` counts:

    - "memory/step_peak_gib", "memory/forward_peak_gib" (the loss included), "memory/backward_peak_gib" (and clipping)
      and "memory/optimizer_peak_gib";
    - "memory/run_peak_gib", the largest step of the run among those measured;

    and on CUDA, weights and optimizer state included:

    - "memory/allocated_peak_gib", the most that PyTorch's allocator had handed out in that step;
    - "memory/max_reserved_gib", `torch.cuda.max_memory_reserved`: since the process began, or that counter was
      restarted.

    Where one process uses several devices each has its own values, such as "memory/step_peak_gib/cuda:1". In
    distributed runs the values are those of the process that logs. A measured step runs under PyTorch's profiler and is
    slower; no counter is restarted and nothing is synchronised. The first step, which allocates the optimizer's state,
    is measured only with `every=1`. `self.steps` has all measurements.

    A step is left out, which is said once, while another PyTorch profiler records or warms up. On other devices (mps,
    xpu, ...), and under `torch.nn.DataParallel`, whose threads the profiler does not see, nothing is measured or
    logged, and `peaks` is None.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data)
        PeakMemoryCallback(every=50).add_to(trainer)  # callbacks=[PeakMemoryCallback()] comes after the reporters
        ```

    Args:
        every: measure the steps whose number is a multiple of it; with `logging_steps` a divisor of `every`, each
            measurement is logged with its own step.

    Raises:
        ValueError: `every` is no integer above 0.
    """

    def __init__(self, every: int = 50) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(
                f"PeakMemoryCallback got every={every!r}, expected an integer above 0. Fix: every=50 measures each "
                "50th step."
            )
        self.every = every
        self.steps: list[PeakMemoryStep] = []
        self._meter: StepMeter | None = None
        self._unlogged: PeakMemoryStep | None = None
        self._run_bytes: dict[str, int] = {}
        self._said: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start over; an earlier run may have ended with an error in the middle of a step."""
        self._end_step()
        self.steps, self._unlogged, self._run_bytes, self._said = [], None, {}, set()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure, if the step is due."""
        step = state.global_step + 1
        if step % self.every:
            return
        reason = _unmeasurable(args)
        if reason:
            self.steps.append(PeakMemoryStep(step, None, reason))
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("PeakMemoryCallback measures nothing in step %d: %s.", step, reason)
            return
        self._meter = StepMeter(args.device.type)
        self._meter.start()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The forward pass of the next micro-batch follows."""
        if self._meter is not None:
            self._meter.enter("forward")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer steps next."""
        if self._meter is not None:
            self._meter.enter("optimizer")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep what was measured; ending here leaves the end of the step to profilers that begin there."""
        if self._meter is None:
            return
        peaks, self._meter = self._meter.stop(), None
        self._unlogged = PeakMemoryStep(state.global_step + 1, peaks)
        self.steps.append(self._unlogged)
        for device, found in peaks.items():
            self._run_bytes[device] = max(self._run_bytes.get(device, 0), found.step_bytes)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the latest measurement, once."""
        if self._unlogged is None or self._unlogged.peaks is None:
            return
        values: dict[str, float] = {}
        for device, peaks in self._unlogged.peaks.items():
            suffix = f"/{device}" if len(self._unlogged.peaks) > 1 else ""
            found = self._values(device, peaks)
            values.update({f"memory/{name}_gib{suffix}": value / _GIB for name, value in found.items()})
        add_to_logs(state, logs, values)
        self._unlogged = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave no profiler behind."""
        self._end_step()

    def _values(self, device: str, peaks: StepPeaks) -> dict[str, int]:
        values = {
            "step_peak": peaks.step_bytes,
            "forward_peak": peaks.forward_bytes,
            "backward_peak": peaks.backward_bytes,
            "optimizer_peak": peaks.optimizer_bytes,
            "run_peak": self._run_bytes[device],
        }
        if peaks.start_bytes is not None:
            values["allocated_peak"] = peaks.start_bytes + peaks.step_bytes
            values["max_reserved"] = torch.cuda.max_memory_reserved(device)
        return values

    def _end_step(self) -> None:
        if self._meter is not None:
            self._meter.abandon()
            self._meter = None


def _unmeasurable(args: TrainingArguments) -> str:
    """Why this step cannot be measured, or ""."""
    if args.device.type not in ("cpu", "cuda"):
        return f"PyTorch has no meter for {args.device.type}"
    if args.n_gpu > 1:
        return "torch.nn.DataParallel runs threads that PyTorch's profiler does not see"
    return "another PyTorch profiler is in use" if profiler_in_use() else ""
