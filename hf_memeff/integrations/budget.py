"""`SageBudgetCallback`: more tokens early in training, fewer later."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_memeff.integrations.logs import LoggingCallback, add_to_logs
from hf_memeff.tuners.budget import change_token_budget, configured_token_budget, token_budget_of

SCHEDULES = ("linear", "cosine")


class SageBudgetCallback(LoggingCallback):
    """Anneal the token budget of a SAGE model over training.

    With f the share of the run's optimizer steps that are done, and u = (f - begin_fraction) / (end_fraction -
    begin_fraction) clamped to [0, 1], the next step's budget is start + w(u) (end - start), where w(u) is u for
    "linear" and (1 - cos(pi u)) / 2 for "cosine". It depends on the step's number alone, so that a resumed run gets
    the budgets of an uninterrupted one. The first steps, in which LoRA's direction changes most, are worth the most
    tokens. After training the model has the budget that it had before.

    The budget of the last step goes into the Trainer's logs as "sage/token_budget": into `trainer.state.log_history`,
    the printed lines, and callbacks that come after this one. The Trainer puts those of `report_to` first; to see the
    budget there, add this one with `SageBudgetCallback().add_to(trainer)`.

    Example:
        ```python
        callbacks = [SageCallback(), SageBudgetCallback(start=1.0, end=0.25, end_fraction=0.5)]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        ```

    Args:
        start: budget at first, a ratio in (0, 1].
        end: budget in the end, likewise.
        schedule: "linear" or "cosine".
        begin_fraction: share of the run's steps before the budget starts to change, in [0, 1).
        end_fraction: share of the run's steps after which it stays at `end`, in (begin_fraction, 1].

    Raises:
        ValueError: an argument is out of its range; on the first step, the model is no SAGE model.
    """

    def __init__(
        self,
        start: float = 1.0,
        end: float = 0.25,
        *,
        schedule: str = "linear",
        begin_fraction: float = 0.0,
        end_fraction: float = 1.0,
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if not _is_number(value) or not 0 < value <= 1:
                raise ValueError(
                    f"SageBudgetCallback got {name}={value!r}, expected a number above 0 and at most 1. Fix: 1.0 keeps "
                    "every token, 0.25 a quarter of them."
                )
        if schedule not in SCHEDULES:
            raise ValueError(
                f"SageBudgetCallback got schedule={schedule!r}, expected one of {', '.join(map(repr, SCHEDULES))}. "
                "Fix: pass one of these."
            )
        fractions = (begin_fraction, end_fraction)
        if not all(map(_is_number, fractions)) or not 0 <= begin_fraction < end_fraction <= 1:
            raise ValueError(
                f"SageBudgetCallback got begin_fraction={begin_fraction!r} and end_fraction={end_fraction!r}, expected "
                "0 <= begin_fraction < end_fraction <= 1. Fix: 0.0 and 1.0 anneal over the whole run."
            )
        self.start, self.end, self.schedule = float(start), float(end), schedule
        self.begin_fraction, self.end_fraction = float(begin_fraction), float(end_fraction)
        self._budget: float | None = None
        self._before: float | str | None = None

    def budget(self, step: int, steps: int) -> float:
        """The budget of one optimizer step.

        Args:
            step: number of the step, from 0.
            steps: steps of the whole run.
        """
        done = step / max(1, steps)
        u = min(1.0, max(0.0, (done - self.begin_fraction) / (self.end_fraction - self.begin_fraction)))
        w = u if self.schedule == "linear" else (1 - math.cos(math.pi * u)) / 2
        return self.start + w * (self.end - self.start) if w < 1 else self.end

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Set the budget of the step that begins."""
        budget = self.budget(state.global_step, state.max_steps)
        before = change_token_budget(model, budget, "SageBudgetCallback")
        if self._before is None:  # an interrupted run may have left its own budget in the model
            self._before = configured_token_budget(model) or before
        self._budget = budget

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the budget of the last step."""
        if self._budget is not None:
            add_to_logs(state, logs, {"sage/token_budget": self._budget})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Give the model its own budget back."""
        if self._before is not None and token_budget_of(model) is not None:  # SageCallback may have detached already
            change_token_budget(model, self._before, "SageBudgetCallback")
        self._budget = self._before = None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
