"""Which backend runs a call, and what all of them compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from hf_memeff.ops.anchor import reference, torch_backend, triton_backend
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import Segment

BACKENDS: dict[str, Callable[..., AnchorResult]] = {
    "torch": torch_backend.anchor_attention,
    "reference": reference.anchor_attention,
    "triton": triton_backend.anchor_attention,
}
"""Every backend by name."""

DENSE_SHARES: dict[str, float] = {
    "torch": torch_backend.DENSE_SHARE,
    "reference": reference.DENSE_SHARE,
    "triton": triton_backend.DENSE_SHARE,
}
"""What `dense_above="auto"` means for each backend."""


def backend_name(config: AnchorAttentionConfig, tensor: Tensor | None = None) -> str:
    """The backend that a config asks for; if it asks for none, "triton" on a GPU that has it, else "torch".

    Args:
        config: the settings.
        tensor: one of the device and dtype that the backend is for; ``None`` is any CPU tensor.

    Raises:
        ValueError: no backend has that name.
        ImportError: the backend is "triton" and the package is missing.
    """
    if config.backend is None:
        fits = tensor is not None and triton_backend.runs_on(tensor) and triton_backend.is_available()
        return "triton" if fits else "torch"
    if config.backend not in BACKENDS:
        raise ValueError(
            f"AnchorAttentionConfig got backend={config.backend!r}, expected one of "
            f"{', '.join(map(repr, BACKENDS))}. Fix: pass one of these, or leave it out."
        )
    if config.backend == "triton" and not triton_backend.is_available():
        raise ImportError(
            "AnchorAttentionConfig got backend='triton' without the package triton, expected it to be installed. "
            "Fix: pip install triton, or leave backend out, which runs 'torch' where there is no triton."
        )
    return config.backend


def every_key_kept(thetas: Sequence[float], config: AnchorAttentionConfig, tensor: Tensor | None = None) -> bool:
    """Whether thresholds and limits say beforehand that every superblock of every head is dense; ``tensor`` as
    `backend_name`.
    """
    share = config.dense_share(DENSE_SHARES[backend_name(config, tensor)])
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
    run = BACKENDS[backend_name(config, q)]
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
