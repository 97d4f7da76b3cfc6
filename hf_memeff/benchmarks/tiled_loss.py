"""The tiled loss of the baselines: a plain cross-entropy over tiles of rows, as chunked and fused losses elsewhere.

It is here so that a baseline does not lose to MeSP by its logits alone. MeSP's own tiles run over the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RowTiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for h, y, g in zip(hidden.split(rows), labels.split(rows), gradient.split(rows), strict=True):
                logits = (h.to(weight.dtype) @ weight.t()).float()
                top = logits.logsumexp(dim=1, keepdim=True)
                loss += (top - logits.gather(1, y[:, None])).sum()
                logits.sub_(top).exp_()
                logits.scatter_add_(1, y[:, None], logits.new_full((len(y), 1), -1.0))
                g.copy_(logits.to(weight.dtype) @ weight)
                del logits  # else it is still there while the next tile's is made
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad.to(gradient.dtype)), None, None, None


def row_tiled_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, tile_bytes: int) -> Tensor:
    """Summed cross-entropy of a frozen head, one tile of rows after the other, gradient formed in the forward pass.

    ``sum_i logsumexp(W h_i) - (W h_i)[labels_i]``, accumulated in float32. Its backward can run once.

    Args:
        hidden: (N, D), any floating dtype.
        weight: (V, D), frozen.
        labels: (N,), int64 in [0, V).
        tile_bytes: bytes of float32 logits alive at a time; a tile has at least one row.

    Returns:
        0-d float32. Saved for backward: the gradient for ``hidden``, N * D elements of its dtype.
    """
    return _RowTiledCrossEntropy.apply(hidden, weight, labels, max(1, tile_bytes // (4 * weight.shape[0])))
