"""Put values of a callback into the logs of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerState


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
