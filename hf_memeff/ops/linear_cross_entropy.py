"""Cross-entropy of a linear head without the logits: ``sum_i -log softmax(post(W h_i + b))[label_i]`` over tiles of rows.

The gradient for the hidden states is formed in the forward pass, tile by tile, so that no logits outlive their tile (the idea is common to Liger-Kernel
and TRL; the arithmetic here keeps the gradient in float32, unscaled by the incoming gradient, so that a float16 GradScaler works).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memeff.ops.precision import accumulation_dtype, autocast_dtype


def _tile_loss_(z: Tensor, labels: Tensor, softcap: float | None, scale: float, *, need_grad: bool) -> Tensor:
    """Loss per row of one tile of raw logits ``z`` (T, V); with ``need_grad``, ``z`` is overwritten by its gradient."""
    capped = None
    if scale != 1.0:
        z.mul_(scale)
    if softcap is not None:
        z.div_(softcap).tanh_()
        capped = z.clone() if need_grad else None
        z.mul_(softcap)
    target = z.gather(1, labels[:, None])
    top = z.amax(dim=1, keepdim=True)
    z.sub_(top).exp_()
    total = z.sum(dim=1, keepdim=True)
    loss = total.log().add_(top).sub_(target).squeeze(1)
    if need_grad:
        z.div_(total)
        z.scatter_add_(1, labels[:, None], torch.full_like(target, -1.0))
        if capped is not None:  # d softcap*tanh(u/softcap) / du = 1 - tanh^2
            z.mul_(capped.square_().neg_().add_(1.0))
        if scale != 1.0:
            z.mul_(scale)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        softcap: float | None,
        scale: float,
        tile_rows: int,
    ) -> Tensor:
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        wide = accumulation_dtype(flat.dtype)
        need_grad = ctx.needs_input_grad[0]
        dtype = autocast_dtype(hidden.device.type) or weight.dtype
        d_hidden = torch.zeros_like(flat, dtype=wide) if need_grad else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        counted = (targets != ignore_index).nonzero().squeeze(1)  # masked prompts cost nothing
        with torch.autocast(hidden.device.type, enabled=False):
            head, shift = weight.to(dtype), bias.to(dtype) if bias is not None else None
            for rows in counted.split(tile_rows):
                z = F.linear(flat[rows].to(dtype), head, shift).to(wide)
                loss += _tile_loss_(z, targets[rows], softcap, scale, need_grad=need_grad).sum()
                if d_hidden is not None:
                    d_hidden[rows] = (z.to(dtype) @ head).to(wide)
                del z
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * 8
        if ctx.needs_input_grad[0]:
            (d_hidden,) = ctx.saved_tensors
            grads[0] = (d_hidden * g.to(d_hidden.dtype)).to(ctx.dtype).view(ctx.shape)
        return tuple(grads)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float = 1.0,
    tile_rows: int = 64,
) -> Tensor:
    """Summed cross-entropy of a frozen linear head; the caller divides by its count.

    ``z_i = softcap tanh(scale (W h_i + b) / softcap)``, ``loss = sum over labels_i != ignore_index of logsumexp(z_i) - z_i[labels_i]``.

    Args:
        hidden: (..., D), any floating dtype.
        weight: (V, D), frozen.
        labels: int64, the shape of ``hidden`` without D, already shifted; each in [0, V) or ``ignore_index``.
        bias: (V,), frozen, or ``None``.
        ignore_index: label of rows that do not count.
        softcap: > 0, or ``None``.
        scale: multiplies the raw logits, before the softcap.
        tile_rows: rows per tile; a tile holds ``tile_rows * V`` float32 values (twice that with a softcap).

    Returns:
        0-d float32 (float64 for float64 input). Saved for backward: the gradient for ``hidden``, N * D float32, only if ``hidden`` wants one.

    Raises:
        ValueError: a trainable head, shapes that do not belong together, labels out of range, or a tile below one row.
    """
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError(
            "got a head whose weight or bias wants a gradient, expected a frozen one. "
            'Compute whole logits for a trained head (tiled_loss="never").'
        )
    if labels.shape != hidden.shape[:-1] or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"got hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)}, weight {tuple(weight.shape)}; "
            "expected labels of the shape of hidden without its last dimension, and weight (V, D)"
        )
    if tile_rows < 1:
        raise ValueError(f"got tile_rows={tile_rows}, expected a number of rows >= 1")
    if labels.device.type == "cpu" and labels.numel():  # on an accelerator this check would wait for the device; the kernel asserts there
        valid = (labels == ignore_index) | ((labels >= 0) & (labels < weight.shape[0]))
        if not bool(valid.all()):
            bad = int(labels[~valid].flatten()[0])
            raise ValueError(
                f"got label {bad}, expected one in [0, {weight.shape[0]}) or ignore_index={ignore_index}. "
                "Check that tokenizer and model belong together and that padding is masked."
            )
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, ignore_index, softcap, scale, tile_rows)
