"""Time and peak memory of a run's steps, for its results."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_memeff.integrations.peak_memory import PeakMemoryCallback

_MEASURED_STEPS = 4


class StepClock(TrainerCallback):
    """Wall time of each optimizer step.

    Attributes:
        seconds: by number of the step.
        resumed_at: steps that were done when training began.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.resumed_at = 0
        self._began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note where it begins."""
        self.resumed_at = state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop the clock."""
        self.seconds[state.global_step] = time.perf_counter() - self._began


class FewStepsMemory(PeakMemoryCallback):
    """`PeakMemoryCallback` for about four steps of a run of any length, not the first, which allocates the optimizer's
    state."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the steps."""
        left = state.max_steps - state.global_step
        self.every = max(min(2, left), left // _MEASURED_STEPS)
        super().on_train_begin(args, state, control, **kwargs)
