"""Which backend runs a call, and what all of them compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from hf_memeff.ops.anchor import reference, torch_backend
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import Segment

BACKENDS: dict[str, Callable[..., AnchorResult]] = {
    "torch": torch_backend.anchor_attention,
    "reference": reference.anchor_attention,
}
"""Every backend by name. The first one runs where a config names none."""

DENSE_SHARES: dict[str, float] = {"torch": torch_backend.DENSE_SHARE, "reference": reference.DENSE_SHARE}
"""What `dense_above="auto"` means for each backend."""


def backend_name(config: AnchorAttentionConfig) -> str:
    """The backend that a config asks for, or the default.

    Raises:
        ValueError: no backend has that name.
    """
    name = config.backend or next(iter(BACKENDS))
    if name not in BACKENDS:
        raise ValueError(
            f"AnchorAttentionConfig got backend={name!r}, expected one of {', '.join(map(repr, BACKENDS))}. "
            "Fix: pass one of these, or leave it out."
        )
    return name


def every_key_kept(thetas: Sequence[float], config: AnchorAttentionConfig) -> bool:
    """Whether thresholds and limits say beforehand that every superblock of every head is dense."""
    share = config.dense_share(DENSE_SHARES[backend_name(config)])
    return share < 1 and config.max_keep is None and all(theta == math.inf for theta in thetas)


def anchor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Sequence[Segment],
    thetas: Sequence[float],
    config: AnchorAttentionConfig,
    scale: float,
    sinks: Tensor | None = None,
    return_kept: bool = False,
) -> AnchorResult:
    """Causal attention of each segment over init, local and kept keys (arXiv 2505.23520; the tiling is ours,
    tiling.py).

    For the rows of a superblock, with x_a the largest logit of a row over init and local keys and means over blocks of
    rows, a candidate j is kept if any block has mean(q) . k_j scale + theta >= mean(x_a); the output is the softmax
    over init, local and kept keys.

    Args:
        q: (B, H, Nq, D).
        k: (B, Hkv, Nk, D), H a multiple of Hkv; not repeated.
        v: (B, Hkv, Nk, Dv).
        segments: which rows belong together; rows and keys outside all of them are padding.
        thetas: H numbers, inf keeps every key.
        config: tiling and limits; its own theta is not read.
        scale: factor of the dot products.
        sinks: (H,), logits that join each row's softmax without a key.
        return_kept: whether ``kept_keys`` of the result is filled.

    Returns:
        Output, log-sum-exp and counts; float64 for float64 inputs, else sums and scores are float32. Not
        differentiable.
    """
    run = BACKENDS[backend_name(config)]
    return run(
        q,
        k,
        v,
        segments=segments,
        thetas=thetas,
        config=config,
        scale=scale,
        sinks=sinks,
        return_kept=return_kept,
    )
