"""One progress bar for many runs, in place of each run's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StepReport(TrainerCallback):
    """Tell how far a run is after each optimizer step.

    Args:
        title: of the run.
        advance: as `progress` yields it; called with the title and how far the run is, such as "step 3 of 40".
    """

    def __init__(self, title: str, advance: Callable[[str, int], object]) -> None:
        self.title = title
        self.advance = advance

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell it."""
        self.advance(f"{self.title}, step {state.global_step} of {state.max_steps}", 0)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No bars of `datasets` inside of a ``with`` block: each trainer would show several for its rows."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
