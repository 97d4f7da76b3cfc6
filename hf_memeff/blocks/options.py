"""Settings of the engine; the tuners' configs carry the same fields and explain them to users."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SalientTokens:
    """Which tokens a block's backward pass runs through (SAGE), and what its attention's backward sees.

    Attributes:
        saliency: what a token's score is: ``attention``, ``gradient``, ``value_norm`` or ``random``.
        token_budget: share of the tokens that are kept, in (0, 1], or ``adaptive``.
        attention_mass: share of the saliency that the kept tokens hold together, for ``adaptive``.
        min_tokens: fewest kept tokens, for ``adaptive``.
        sink_tokens: first real tokens of each sequence that are always kept.
        keep_last: whether each sequence's last real token is always kept.
        dense_layers: blocks that keep every token, counted from the end where negative.
        backward_keys: ``kept`` (attention among kept tokens) or ``all`` (kept queries, all keys).
        query_rows: rows whose attention is scored: ``labels`` (those that predict a label), ``last``, or at most so
            many of the first kind, evenly spaced.
    """

    saliency: str = "attention"
    token_budget: float | str = 0.5
    attention_mass: float = 0.8
    min_tokens: int = 8
    sink_tokens: int = 4
    keep_last: bool = True
    dense_layers: tuple[int, ...] = (-1,)
    backward_keys: str = "kept"
    query_rows: str | int = "labels"


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
        salient: which tokens the backward pass of a block runs through; ``None`` is all of them (MeSP).
    """

    activation_store: str = "memory"
    activation_store_dir: str | None = None
    tiled_loss: str = "auto"
    loss_tile_bytes: int | None = None
    mlp_tile_tokens: int | None = None
    strict: bool = False
    salient: SalientTokens | None = None
