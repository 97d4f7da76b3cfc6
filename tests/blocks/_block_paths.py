"""Which path blocks take, and that what they compute there is LoRA's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from blocks._models import LENGTH, engine, errors, step
from blocks._tolerances import ORDER_OF_SUMS
from helpers import token_batch
from hf_memeff.blocks.attach import engine_status

TOLERANCE = ORDER_OF_SUMS[torch.float64]


def reports(model: nn.Module) -> list[tuple[str, str]]:
    """Path and reason of each block."""
    return [(b.path, b.reason) for b in engine_status(model.get_base_model()).blocks]


def assert_lora_s(model: nn.Module, path: str, reason: str, batch: dict[str, Any] | None = None) -> None:
    """Gradients are LoRA's, every block takes ``path``, and its reason contains ``reason``."""
    batch = token_batch(2, LENGTH, "right") if batch is None else batch
    expected = step(model, batch)
    with engine(model):
        found = reports(model)
        got = step(model, batch)
        after = reports(model)
    assert max(errors(got, expected).values()) <= TOLERANCE
    assert torch.equal(got.random, expected.random)
    assert found and all(p == path and reason in r for p, r in found), found
    assert after == found
