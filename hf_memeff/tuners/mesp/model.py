"""`MespModel`: the tuner of `MespConfig`."""

from __future__ import annotations

from typing import ClassVar

from hf_memeff.tuners.model import MemeffModel


class MespModel(MemeffModel):
    """LoRA adapters whose gradients are LoRA's, computed by re-running each block piece by piece."""

    method: ClassVar[str] = "mesp"
