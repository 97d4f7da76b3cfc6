"""`SageModel`: the tuner of `SageConfig`."""

from __future__ import annotations

from typing import ClassVar

from hf_memeff.tuners.model import MemeffModel


class SageModel(MemeffModel):
    """LoRA adapters whose gradients are computed through the salient tokens of each block; the forward is LoRA's."""

    method: ClassVar[str] = "sage"
