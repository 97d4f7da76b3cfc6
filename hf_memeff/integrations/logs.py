"""Put values of a callback into the logs of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.integrations import get_reporting_integration_callbacks

if TYPE_CHECKING:
    from transformers import Trainer


class LoggingCallback(TrainerCallback):
    """Base of the callbacks that add values to the Trainer's logs."""

    def add_to(self, trainer: Trainer) -> None:
        """Add this callback to a trainer, in front of those that report to TensorBoard, Weights & Biases and others.

        The Trainer calls the reporters of `report_to` before what it is given as `callbacks`, so that they would miss
        the values, which are then only in the printed lines and in `trainer.state.log_history`.

        Args:
            trainer: a Trainer, or what builds on it; its reporters are moved behind all other callbacks.
        """
        trainer.add_callback(self)
        for kind in get_reporting_integration_callbacks(trainer.args.report_to):
            reporter = trainer.pop_callback(kind)
            if reporter is not None:
                trainer.add_callback(reporter)


def add_to_logs(state: TrainerState, logs: dict[str, Any] | None, values: Mapping[str, float]) -> None:
    """Add values to the entry that the Trainer is logging now; to be called in `on_log`.

    `state.log_history` holds a copy of the entry already when callbacks get `logs` (transformers 5), so both get them.

    Args:
        state: the Trainer's state.
        logs: what `on_log` was given; later callbacks, printers among them, see the same dict.
        values: numbers by name.
    """
    if logs is not None:
        logs.update(values)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(values)
