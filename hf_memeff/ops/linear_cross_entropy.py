"""Cross-entropy of a linear head without its logits.

``sum_i -log softmax(post(W h_i + b))[label_i]``, over tiles of the vocabulary; ``post`` is scale and softcap. The
gradient for the hidden states is formed in the forward pass, in one sweep over the vocabulary with a running maximum,
as FlashAttention (arXiv 2205.14135, algorithm 1) does with keys that are their own values: a tile of logits is turned
into weights ``exp(z - max)``, multiplied with its part of ``W`` at once, and forgotten. Tiles of classes keep all rows
in one matrix product; tiles of 64 rows, the usual way, read the whole head once per tile, which took 3.5 times as long
on a CPU (V = 49,152).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memeff.ops.precision import accumulation_dtype, autocast_dtype, matmul

_FEWEST_CLASSES = 512  # narrower tiles than this cost time and save nothing worth having: rows are split first


class _Sweep:
    """Running softmax statistics of some rows while their logits pass by, tile by tile.

    Attributes:
        top: (R, 1), largest logit so far.
        others: (R, 1), sum of ``exp(z - top)`` over all classes but the label's. Kept apart from the label's own term,
            because the gradient needs ``1 - p_label`` to full precision when ``p_label`` is almost 1.
        label_logit: (R, 1).
        label_slope: (R, 1), derivative of the label's logit by its raw logit (softcap and scale).
        weighted: (R, D) sum of ``exp(z - top) dz/draw W`` over all classes but the label's, or ``None`` where no
            gradient is wanted.
    """

    def __init__(
        self, labels: Tensor, weighted: Tensor | None, softcap: float | None, scale: float, dtype: torch.dtype
    ) -> None:
        empty = torch.zeros(len(labels), 1, dtype=dtype, device=labels.device)
        self.labels, self.weighted, self.softcap, self.scale = labels[:, None], weighted, softcap, scale
        self.top = empty - torch.inf
        self.others = empty.clone()
        self.label_logit = empty.clone()
        self.label_slope = empty + scale

    def see(self, z: Tensor, head: Tensor, first: int) -> None:
        """Take in the raw logits of the next classes.

        Args:
            z: (R, C), logits of classes ``first`` to ``first + C``; overwritten.
            head: (C, D), the weights of these classes.
            first: number of the first class.
        """
        slope = None
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_()
            # d softcap tanh(u / softcap) / du = 1 - tanh^2
            slope = z.square().neg_().add_(1.0) if self.weighted is not None else None
            z.mul_(self.softcap)
        here = (self.labels >= first) & (self.labels < first + z.shape[1])
        place = (self.labels - first).clamp_(0, z.shape[1] - 1)
        self.label_logit = torch.where(here, z.gather(1, place), self.label_logit)
        top = torch.maximum(self.top, z.amax(dim=1, keepdim=True))
        decay = (self.top - top).exp_()
        self.top = top
        weights = z.sub_(top).exp_()
        weights.scatter_(1, place, weights.gather(1, place).masked_fill_(here, 0.0))
        self.others.mul_(decay).add_(weights.sum(dim=1, keepdim=True))
        if self.weighted is None:
            return
        if slope is not None:
            self.label_slope = torch.where(here, slope.gather(1, place) * self.scale, self.label_slope)
            weights.mul_(slope)
        self.weighted.mul_(decay)
        if self.weighted.dtype == head.dtype:
            self.weighted.addmm_(weights, head, alpha=self.scale)
        else:
            self.weighted.add_(matmul(weights.to(head.dtype), head), alpha=self.scale)

    def finish(self, head: Tensor) -> Tensor:
        """Loss per row (R,); ``weighted`` becomes the gradient. ``head`` is the whole weight (V, D)."""
        label_term = (self.label_logit - self.top).exp_()
        total = self.others + label_term
        if self.weighted is not None:
            self.weighted.div_(total)
            push = self.others.div(total).mul_(self.label_slope).neg_()
            for rows in range(0, len(push), 128):  # head[labels] whole would be as large as the gradient itself
                part = slice(rows, rows + 128)
                self.weighted[part].addcmul_(head[self.labels[part, 0]].to(self.weighted.dtype), push[part])
        return total.log_().add_(self.top).sub_(self.label_logit).squeeze(1)


def _blocks(rows: int, classes: int, tile_bytes: int) -> Iterator[tuple[slice, int]]:
    """Cut into tiles of at most ``tile_bytes`` of float32 logits: parts of the rows, and classes per tile of each."""
    per_tile = max(1, tile_bytes // 4)
    height = max(1, min(rows, per_tile // min(classes, _FEWEST_CLASSES)))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows)), min(classes, max(1, per_tile // height))


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
        tile_bytes: int,
    ) -> Tensor:
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        wide = accumulation_dtype(flat.dtype)
        dtype = autocast_dtype(hidden.device.type) or weight.dtype
        counted = (targets != ignore_index).nonzero().squeeze(1)  # masked prompts cost nothing
        everything = len(counted) == len(targets)
        rows = flat if everything else flat[counted]
        chosen = targets if everything else targets[counted]
        need_grad = ctx.needs_input_grad[0]
        gradient = torch.zeros(rows.shape, dtype=wide, device=rows.device) if need_grad else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, width in _blocks(len(rows), len(weight), tile_bytes):
                sweep = _Sweep(chosen[part], gradient[part] if gradient is not None else None, softcap, scale, wide)
                x = rows[part].to(dtype)
                for first in range(0, len(weight), width):
                    head = weight[first : first + width].to(dtype)
                    shift = bias[first : first + width].to(dtype) if bias is not None else None
                    sweep.see(F.linear(x, head, shift).to(wide), head, first)
                loss += sweep.finish(weight).sum()
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        if gradient is not None:
            if not everything:
                gradient = torch.zeros_like(flat, dtype=wide).index_copy_(0, counted, gradient)
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * 8
        if ctx.needs_input_grad[0]:
            (gradient,) = ctx.saved_tensors
            grads[0] = (gradient * g.to(gradient.dtype)).to(ctx.dtype).view(ctx.shape)
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
    tile_bytes: int = 16 * 2**20,
) -> Tensor:
    """Summed cross-entropy of a frozen linear head; the caller divides by its count.

    ``z_i = softcap tanh(scale (W h_i + b) / softcap)``, ``loss = sum over labels_i != ignore_index of logsumexp(z_i)
    - z_i[labels_i]``.

    Args:
        hidden: (..., D), any floating dtype.
        weight: (V, D), frozen.
        labels: int64, the shape of ``hidden`` without D, already shifted; each in [0, V) or ``ignore_index``.
        bias: (V,), frozen, or ``None``.
        ignore_index: label of rows that do not count.
        softcap: > 0, or ``None``.
        scale: multiplies the raw logits, before the softcap.
        tile_bytes: bytes of float32 logits alive at a time, >= 4 (twice that with a softcap); rows are split once a
            tile would hold fewer than 512 classes.

    Returns:
        0-d float32 (float64 for float64 input). Saved for backward: the gradient for ``hidden``, N * D float32, only if
        ``hidden`` wants one.

    Raises:
        ValueError: a trainable head, shapes that do not belong together, labels out of range, or a tile too small for
            one logit.
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
    if tile_bytes < 4:
        raise ValueError(f"got tile_bytes={tile_bytes}, expected at least 4 (one float32 logit)")
    # on an accelerator this check would wait for the device; the kernel asserts there
    if labels.device.type == "cpu" and labels.numel():
        valid = (labels == ignore_index) | ((labels >= 0) & (labels < weight.shape[0]))
        if not bool(valid.all()):
            bad = int(labels[~valid].flatten()[0])
            raise ValueError(
                f"got label {bad}, expected one in [0, {weight.shape[0]}) or ignore_index={ignore_index}. "
                "Check that tokenizer and model belong together and that padding is masked."
            )
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, ignore_index, softcap, scale, tile_bytes)
