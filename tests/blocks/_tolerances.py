"""How far two ways to compute the same thing may be apart: |got - expected| / |expected| of one tensor (2-norms)."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = 0.0
"""Same operations in the same order: a re-run, a tile of rows that no sum crosses, a value that is only handed on."""

ORDER_OF_SUMS = {
    # sums of at most a few thousand terms in another order; the issue's own limits
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    # eps is 9.8e-4 and 7.8e-3: a few roundings at other places (after a tile, after a fused kernel)
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""The same formula, other order of summation or other places of rounding, by the coarsest dtype in it."""

FLOAT32_INSIDE = 1e-6
"""float64 around a part that the models compute in float32 (softmax, norms, loss): its rounding may differ."""

LORA_ROUNDING_FACTOR = 1.5
"""In half precision LoRA and the engine are both off the float64 result; ours by at most this times LoRA's error."""


def relative_error(got: Tensor | None, expected: Tensor | None) -> float:
    """|got - expected| / |expected| (2-norms), 0 where both are absent or empty, infinite where one is."""
    if got is None or expected is None:
        return 0.0 if got is expected else float("inf")
    assert got.shape == expected.shape, (got.shape, expected.shape)
    got, expected = got.detach().double(), expected.detach().double()
    if not expected.numel():
        return 0.0
    return ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def coarsest(*dtypes: torch.dtype | None) -> float:
    """The tolerance of the coarsest of several dtypes; ``None`` counts for nothing."""
    return max(ORDER_OF_SUMS[dtype] for dtype in dtypes if dtype is not None)
