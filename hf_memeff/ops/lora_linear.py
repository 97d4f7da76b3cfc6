"""Linear layers with low-rank adapters: ``y = x W^T + b + sum_k s_k drop_k(x) A_k^T Bm_k^T``.

Backward (MeSP, arXiv 2602.13069, section 3; PEFT's layout of ``A`` and ``Bm``), with ``h = drop(x) A^T`` recomputed:
``dBm = s g^T h``, ``dh = s g Bm``, ``dA = dh^T drop(x)``, ``dx = g W + mask (dh A) / (1 - p)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_memeff.ops.dropout import DropMask, draw_mask, replayed_rng, save_rng
from hf_memeff.ops.precision import accumulation_dtype, autocast_dtype, matmul

Rows = slice | Tensor


@dataclass(slots=True)
class LoraTerm:
    """One active adapter of a linear layer during one pass.

    Attributes:
        a: (r, Din), in the dtype the branch computes in.
        b: (Dout, r), likewise.
        scaling: s.
        mask: its dropout mask over all N rows, or ``None``.
        grad_a: (r, Din) accumulator, or ``None`` where ``A`` wants no gradient (or in a forward pass).
        grad_b: (Dout, r) accumulator, likewise.
    """

    a: Tensor
    b: Tensor
    scaling: float
    mask: DropMask | None = None
    grad_a: Tensor | None = None
    grad_b: Tensor | None = None

    @classmethod
    def make(
        cls,
        a: Tensor,
        b: Tensor,
        scaling: float,
        mask: DropMask | None,
        dtype: torch.dtype,
        wanted: tuple[bool, bool] = (False, False),
    ) -> LoraTerm:
        """Make the term of one pass from the adapter's parameters.

        Args:
            a: (r, Din) ``lora_A``.
            b: (Dout, r) ``lora_B``.
            scaling: s.
            mask: dropout mask.
            dtype: what the branch computes in.
            wanted: whether ``a`` and ``b`` want a gradient from this pass.
        """
        totals = [
            torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) if want else None
            for p, want in zip((a, b), wanted, strict=True)
        ]
        return cls(
            a.to(dtype),
            column_major(b.to(dtype)),
            scaling,
            mask,
            totals[0],
            None if totals[1] is None else column_major(totals[1]),
        )

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The accumulated gradients of the parameters ``a`` and ``b``, in their dtypes and layout."""
        return (
            None if self.grad_a is None else self.grad_a.to(a.dtype),
            None if self.grad_b is None else self.grad_b.to(b.dtype).contiguous(),
        )

    def input(self, x: Tensor, rows: Rows) -> Tensor:
        """What the adapter reads: ``drop(x)`` in the branch's dtype, (T, Din)."""
        x = x.to(self.a.dtype)
        return x if self.mask is None else self.mask.apply(x, rows)

    def add_to(self, y: Tensor, x: Tensor, rows: Rows) -> Tensor:
        """Add the branch to ``y`` (T, Dout), in place where dtypes agree; the result keeps the dtype of ``y``."""
        hidden = self.input(x, rows) @ self.a.t()
        if y.dtype in (torch.bfloat16, torch.float16) and y.dtype == self.b.dtype:
            # LoRA rounds Bm's output, its scaling and the sum, one after the other: in half precision those roundings
            # are as large as the differences between runs, and the same ones make the same losses
            return y.add_((hidden @ self.b.t()).mul_(self.scaling))
        if y.dtype == self.b.dtype:
            return y.addmm_(hidden, self.b.t(), alpha=self.scaling)
        return torch.addmm(y.to(self.b.dtype), hidden, self.b.t(), alpha=self.scaling).to(y.dtype)

    def backward(self, g: Tensor, x: Tensor, dx: Tensor | None, rows: Rows) -> Tensor | None:
        """Accumulate ``dA`` and ``dBm`` of the rows and add the branch's part to ``dx`` (T, Din) if it is wanted."""
        g = g.to(self.b.dtype)
        d_hidden = (g @ self.b).mul_(self.scaling)
        if self.grad_a is not None or self.grad_b is not None:
            dropped = self.input(x, rows)
            if self.grad_b is not None:
                _accumulate(self.grad_b, g.t(), dropped @ self.a.t(), self.scaling)
            if self.grad_a is not None:
                _accumulate(self.grad_a, d_hidden.t(), dropped, 1.0)
        if dx is None:
            return None
        if self.mask is None and dx.dtype == self.a.dtype and dx.dtype not in (torch.bfloat16, torch.float16):
            return dx.addmm_(d_hidden, self.a)
        branch = matmul(d_hidden, self.a)
        if self.mask is not None:
            branch = branch.mul_(self.mask.scale).mul_(self.mask.keep[rows])
        return dx.add_(branch)


def column_major(matrix: Tensor) -> Tensor:
    """The same (Dout, r) matrix with its columns contiguous.

    Skinny factors make skinny matrix products: with ``Bm`` and ``dBm`` laid out this way, ``g Bm`` and ``g^T h`` took
    0.4 and 0.2 times as long on a CPU (MKL, r = 8, Dout = 1536).
    """
    return matrix.t().contiguous().t()


def _accumulate(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    else:
        total.add_(matmul(left, right), alpha=alpha)


@dataclass(slots=True)
class LinearOp:
    """A frozen linear layer and its active adapters, ready to run on rows.

    Exactly one of ``weight`` and ``call`` is set. ``call`` is the base layer's own forward, for weights that cannot be
    read (quantised, sharded): its input gradient then comes from autograd, at the cost of one more forward of the
    layer.

    Attributes:
        weight: (Dout, Din) in the dtype the layer computes in, or ``None``.
        bias: (Dout,) or ``None``.
        call: (T, Din) -> (T, Dout), or ``None``.
        terms: active adapters in PEFT's order.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    call: Callable[[Tensor], Tensor] | None = None
    terms: Sequence[LoraTerm] = ()

    def forward(self, x: Tensor, rows: Rows = slice(None)) -> Tensor:
        """Map rows ``x`` (T, Din) to (T, Dout). ``rows`` says which of the N rows they are, for the dropout masks."""
        if self.call is not None:
            y = self.call(x)
            if self.terms:
                y = y.clone()  # a black box may hand out a tensor it keeps
        else:
            assert self.weight is not None
            y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        for term in self.terms:
            y = term.add_to(y, x, rows)
        return y

    def backward(self, g: Tensor, x: Tensor, rows: Rows = slice(None), *, need_input: bool = True) -> Tensor | None:
        """Gradient for ``x`` (T, Din) in its dtype, or ``None`` where it is not wanted; adapters accumulate theirs.

        Args:
            g: (T, Dout), gradient of the output.
            x: (T, Din), the rows the forward pass read.
            rows: as in ``forward``.
            need_input: whether ``dx`` is wanted at all; without it neither ``g W`` nor the branch's part is computed.
        """
        dx = self._base_backward(g, x) if need_input else None
        for term in self.terms:
            dx = term.backward(g, x, dx, rows)
        return dx

    def outputs(self, part: slice) -> LinearOp:
        """The same layer restricted to output features ``part``.

        Its terms accumulate into the same gradients (views, no copies).
        """
        assert self.weight is not None
        return LinearOp(
            self.weight[part],
            self.bias[part] if self.bias is not None else None,
            terms=[
                LoraTerm(t.a, t.b[part], t.scaling, t.mask, t.grad_a, t.grad_b[part] if t.grad_b is not None else None)
                for t in self.terms
            ],
        )

    def inputs(self, part: slice) -> LinearOp:
        """The same layer restricted to input features ``part``, without bias.

        Outputs and ``dBm`` of all parts add up to the whole layer's.
        """
        assert self.weight is not None
        return LinearOp(
            self.weight[:, part],
            terms=[
                LoraTerm(
                    t.a[:, part],
                    t.b,
                    t.scaling,
                    DropMask(t.mask.keep[:, part], t.mask.scale) if t.mask is not None else None,
                    t.grad_a[:, part] if t.grad_a is not None else None,
                    t.grad_b,
                )
                for t in self.terms
            ],
        )

    def _base_backward(self, g: Tensor, x: Tensor) -> Tensor:
        if self.call is None:
            assert self.weight is not None
            return matmul(g.to(self.weight.dtype), self.weight).to(x.dtype)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = self.call(leaf)
        dx = torch.autograd.grad(y, leaf, g.to(y.dtype))[0]
        return dx.clone() if self.terms else dx


def branch_dtype(adapter: Tensor, device_type: str) -> torch.dtype:
    """The dtype LoRA's branch computes in: autocast's where it is on, else the adapter's own."""
    return autocast_dtype(device_type) or adapter.dtype


class _LoraBranch(torch.autograd.Function):
    """``base_out + s drop(x) A^T Bm^T``; saves ``x`` as it came in, and never PEFT's cast copy of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base_out: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: nn.Module | None
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        dtype = branch_dtype(a, x.device.type)
        drops = isinstance(dropout, nn.Dropout) and dropout.p > 0.0 and dropout.training
        states = save_rng(x.device) if drops else []
        mask = draw_mask(dropout, len(flat), flat.shape[1], a.dtype, x.device)
        ctx.scaling, ctx.compute_dtype = scaling, dtype
        ctx.probability = dropout.p if isinstance(dropout, nn.Dropout) and drops else 0.0
        ctx.save_for_backward(x, a, b, *states)
        with torch.autocast(x.device.type, enabled=False):
            term = LoraTerm.make(a, b, scaling, mask, dtype)
            y = base_out.reshape(-1, base_out.shape[-1]).clone()
            return term.add_to(y, flat, slice(None)).view(base_out.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, *states = ctx.saved_tensors
        need_x, need_base, need_a, need_b = ctx.needs_input_grad[:4]
        if not (need_x or need_a or need_b):
            return None, g if need_base else None, None, None, None, None
        flat, g_flat = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        mask = None
        if states:
            with replayed_rng(states, x.device):
                mask = draw_mask(nn.Dropout(ctx.probability), len(flat), flat.shape[1], a.dtype, x.device)
        with torch.autocast(x.device.type, enabled=False):
            term = LoraTerm.make(a, b, ctx.scaling, mask, ctx.compute_dtype, (need_a, need_b))
            dx = term.backward(g_flat, flat, torch.zeros_like(flat) if need_x else None, slice(None))
        return dx.view(x.shape) if dx is not None else None, g if need_base else None, *term.gradients(a, b), None, None


def lora_linear_apply(
    x: Tensor, base_out: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: nn.Module | None = None
) -> Tensor:
    """Add one adapter's branch to the output of its base layer, saving only the input both share.

    ``y = base_out + s drop(x) A^T Bm^T`` (MeSP, arXiv 2602.13069, section 3). Stock LoRA saves a cast copy of ``x`` in
    the adapter's dtype, ``drop(x)`` and ``h``; this saves ``x`` itself. It computes in autocast's dtype where autocast
    is on, else in the adapter's, as LoRA does.

    Args:
        x: (..., Din), the input as the layer received it, any floating dtype.
        base_out: (..., Dout), output of the base layer.
        a: (r, Din), ``lora_A``.
        b: (Dout, r), ``lora_B``.
        scaling: s.
        dropout: the adapter's dropout module; its mask is drawn again in backward, not stored.

    Returns:
        (..., Dout) in the dtype of ``base_out``. Saved for backward: ``x`` (shared with the frozen layer's other
        readers), ``A``, ``Bm``, and 5,056 bytes of generator state (and the accelerator's) only where dropout is
        active.
    """
    return _LoraBranch.apply(x, base_out, a, b, scaling, dropout)
