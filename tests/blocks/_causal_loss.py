"""A batch, how its loss is computed, and the tiled loss against the model's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from blocks._models import LENGTH, engine, errors, step
from helpers import token_batch
from hf_memeff.blocks.attach import engine_status

BATCH = token_batch(2, LENGTH, "right")


def loss_path(model: nn.Module) -> tuple[str, str]:
    """Path and reason of the loss."""
    report = engine_status(model.get_base_model()).tiled_loss
    return report.path, report.reason


def compare(
    model: nn.Module, batch: dict[str, Any] | None = None, expected_path: str = "tiled", **options: Any
) -> float:
    """Largest relative error of loss and gradients, tiled against the model's own loss, both with the engine on."""
    batch = BATCH if batch is None else batch
    with engine(model, tiled_loss="never"):
        expected = step(model, batch)
    with engine(model, **options):
        assert loss_path(model)[0] == expected_path
        got = step(model, batch)
    return max(errors(got, expected).values())
