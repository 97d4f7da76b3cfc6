"""RMSNorm (three weight conventions) and LayerNorm with hand-derived input gradients.

The weights are frozen: both functions return no weight gradient, and a trainable norm is the caller's to run through
autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memeff.ops.precision import accumulation_dtype


@dataclass(frozen=True, slots=True)
class NormOp:
    """One frozen norm, ready to run on rows.

    RMSNorm: ``y = x / n * (offset + w)`` with ``n = sqrt(mean(x^2) + eps)``; its gradient is
    ``dx = (g w) / n - x mean((g w) x) / n^3`` (MeSP, arXiv 2602.13069, section 3). LayerNorm subtracts the mean first.

    Attributes:
        kind: ``rms`` or ``layer``.
        weight: (D,) or ``None`` for a norm without weight.
        bias: (D,) or ``None``; LayerNorm only.
        eps: added to the mean square.
        offset: 0.0, or 1.0 for the ``1 + w`` convention of Gemma.
        round_first: round ``x / n`` to the input's dtype before the weight is applied (Llama) instead of after (Gemma,
            OLMo-2).
        float32_statistics: compute in float32 for float64 rows too, as the RMSNorms of transformers do; else float64
            rows are computed in float64.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    round_first: bool = True
    float32_statistics: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows ``x`` (N, D); returns the dtype the model's own norm returns."""
        if self._narrowing(x):
            return self._step_by_step(x)
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x.to(accumulation_dtype(x.dtype))
        normed = wide * self._inverse_rms(wide)
        if self.weight is None:
            return normed.to(x.dtype)
        if self.round_first and self.offset == 0.0:
            normed = normed.to(x.dtype)
            return normed.mul_(self.weight) if normed.dtype == self.weight.dtype else self.weight * normed
        return normed.mul_(self.weight.to(wide.dtype) + self.offset).to(x.dtype)

    def backward(self, g: Tensor, x: Tensor) -> Tensor:
        """Gradient (N, D) for the rows ``x`` (N, D), in their dtype, from ``g`` (N, D) and ``x`` alone."""
        if self._narrowing(x):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad(self._step_by_step(leaf), leaf, g)[0]
        wide = x.to(accumulation_dtype(x.dtype))
        scale = self._scale(wide.dtype)
        gw = g.to(wide.dtype) * scale if scale is not None else g.to(wide.dtype, copy=True)
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
            inverse = self._inverse_rms(wide)
            coefficient = (gw * wide).mean(-1, keepdim=True).mul_(inverse**3)
            return gw.sub_(gw.mean(-1, keepdim=True)).mul_(inverse).addcmul_(wide, coefficient, value=-1.0).to(x.dtype)
        inverse = self._inverse_rms(wide)
        coefficient = (gw * wide).mean(-1, keepdim=True).mul_(inverse**3)
        return gw.mul_(inverse).addcmul_(wide, coefficient, value=-1.0).to(x.dtype)

    def _narrowing(self, x: Tensor) -> bool:
        return self.float32_statistics and x.dtype == torch.float64

    def _step_by_step(self, x: Tensor) -> Tensor:
        """The RMSNorm in the models' own order of operations.

        Its float32 rounding is part of a float64 result, to the last bit.
        """
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(x.dtype)
        if self.offset:
            return (normed * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype) if self.round_first else (self.weight * normed).to(x.dtype)

    def _inverse_rms(self, wide: Tensor) -> Tensor:
        # not torch.linalg.vector_norm, which builds no x^2: its float32 sum is 20 times less accurate on the CPU
        return wide.square().mean(dim=-1, keepdim=True).add_(self.eps).rsqrt_()

    def _scale(self, dtype: torch.dtype) -> Tensor | None:
        if self.weight is None:
            return None
        weight = self.weight.to(dtype)
        return weight + self.offset if self.offset else weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: dict[str, Any]) -> Tensor:
        op = NormOp(weight=weight, bias=bias, **settings)
        ctx.settings, ctx.has_weight = settings, weight is not None
        ctx.save_for_backward(x, *([weight] if weight is not None else []))
        return op.forward(x.reshape(-1, x.shape[-1])).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        x = ctx.saved_tensors[0]
        weight = ctx.saved_tensors[1] if ctx.has_weight else None
        op = NormOp(weight=weight, bias=None, **ctx.settings)
        width = x.shape[-1]
        return op.backward(g.reshape(-1, width), x.reshape(-1, width)).view(x.shape), None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, round_first: bool = True) -> Tensor:
    """RMSNorm over the last dimension with a frozen weight.

    Args:
        x: (..., D), any floating dtype; statistics are float32 at least.
        weight: (D,), frozen, or ``None``.
        eps: added to the mean square, > 0.
        offset: 1.0 for Gemma's ``1 + w``.
        round_first: see ``NormOp``.

    Returns:
        (..., D). Saved for backward: ``x`` and a reference to ``weight``, 0 bytes beyond them.

    Raises:
        ValueError: the weight wants a gradient.
    """
    _refuse_trainable(weight)
    return _Norm.apply(x, weight, None, {"kind": "rms", "eps": eps, "offset": offset, "round_first": round_first})


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension with frozen weight and bias; arguments and saved bytes as ``rms_norm``."""
    _refuse_trainable(weight)
    _refuse_trainable(bias)
    return _Norm.apply(x, weight, bias, {"kind": "layer", "eps": eps})


def _refuse_trainable(weight: Tensor | None) -> None:
    if weight is not None and weight.requires_grad:
        raise ValueError(
            "got a norm weight with requires_grad=True, expected a frozen one: this op computes no weight gradient. "
            "Use torch.nn.functional.rms_norm or layer_norm for a trained norm."
        )
