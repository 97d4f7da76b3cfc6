"""Dropout masks that are drawn again instead of stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class DropMask(NamedTuple):
    """Which inputs a dropout keeps, and the factor the kept ones are multiplied with.

    Attributes:
        keep: bool, (N, width).
        scale: 1 / (1 - p), rounded as the dropout module rounds it in its compute dtype.
    """

    keep: Tensor
    scale: float

    def apply(self, x: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """``x * keep[rows] * scale`` in a new tensor, (T, width)."""
        return (x * self.scale).mul_(self.keep[rows])


def draw_mask(
    dropout: nn.Module | None, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> DropMask | None:
    """Draw one mask whole, through the dropout module itself: it consumes the random numbers that LoRA would.

    Args:
        dropout: the module PEFT applies to the adapter's input; ``None``, ``nn.Identity``, ``p = 0`` and eval mode draw
            nothing.
        rows: N, all rows of the call (slicing comes later: the generator's order depends on the whole shape).
        width: features of the tensor the module would receive.
        dtype: dtype of that tensor.
        device: its device.

    Returns:
        The mask, 1 byte per element, or ``None`` where the module passes its input through.
    """
    if not isinstance(dropout, nn.Dropout) or dropout.p == 0.0 or not dropout.training:
        return None
    one = torch.ones((), dtype=dtype, device=device)
    keep = dropout(one.expand(rows, width)) != 0
    scale = float(one.div(1.0 - dropout.p)) if dropout.p < 1.0 else 0.0
    return DropMask(keep, scale)


def save_rng(device: torch.device) -> list[Tensor]:
    """States of the generators a re-run may consume: the CPU's, and the accelerator's where ``device`` is one."""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    return states


@contextmanager
def replayed_rng(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Run a block of code from saved generator states and put the generators back afterwards."""
    accelerator = torch.get_device_module(device.type) if len(states) > 1 else None
    before = save_rng(device)
    torch.set_rng_state(states[0].cpu())
    if accelerator is not None:
        accelerator.set_rng_state(states[1].cpu(), device)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        if accelerator is not None:
            accelerator.set_rng_state(before[1], device)
