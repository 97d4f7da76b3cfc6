"""Which dtype a sum is kept in, and which dtype a layer computes in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: where statistics, losses and adapter gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, (M, K) by (K, N).

    On a CPU without matrix units for half precision, PyTorch 2.13 multiplies two row-major half-precision matrices 20
    to 40 times slower than a row-major by a column-major one (oneDNN, AVX2); a transposed copy of ``right`` pays for
    itself.
    """
    if left.device.type == "cpu" and left.dtype in (torch.bfloat16, torch.float16):
        return F.linear(left, right.t().contiguous())
    return left @ right


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype autocast would compute matrix products in on ``device_type``, or ``None`` where autocast is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
