"""Settings of the engine; the tuners' configs carry the same fields and explain them to users."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """How blocks and loss run.

    Attributes:
        activation_store: where block inputs wait for backward: ``memory``, ``cpu`` (pinned, for a GPU) or ``disk``.
        activation_store_dir: folder of the disk store; ``None`` is the user's cache folder.
        tiled_loss: ``auto`` (training steps), ``always`` or ``never``.
        loss_tile_bytes: bytes of float32 logits in one tile of the loss; ``None`` is 4 block inputs.
        mlp_tile_tokens: rows of one tile of a block; ``None`` is a quarter of the step's rows, at least 256.
        strict: whether a block that cannot run structured is an error.
    """

    activation_store: str = "memory"
    activation_store_dir: str | None = None
    tiled_loss: str = "auto"
    loss_tile_bytes: int | None = None
    mlp_tile_tokens: int | None = None
    strict: bool = False
