"""Which dtype a sum is kept in, and which dtype a layer computes in."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: where statistics, losses and adapter gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype autocast would compute matrix products in on ``device_type``, or ``None`` where autocast is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
