"""Gated and plain MLP with adapters on any subset of their projections, computed and differentiated in row tiles.

Gated: ``y = down(act(gate(x)) * up(x))``. Plain: ``y = down(act(up(x)))``. Backward recomputes everything but ``x``;
the down projection is never re-run, since nothing reads its output (MeSP, arXiv 2602.13069, section 3; the tiles are
ours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memeff.ops.activations import Activation, identify_activation
from hf_memeff.ops.lora_linear import LinearOp, LoraTerm, Rows

_FEATURE_PARTS = 2


@dataclass(slots=True)
class MlpOp:
    """An MLP ready to run on rows.

    Attributes:
        gate: (I, D) projection, or ``None`` for a plain MLP. ``fused`` layers hold gate and up in one projection.
        up: (I, D) projection; with ``fused`` (2 I, D), gate first.
        down: (D, I) projection.
        act: the activation.
        fused: whether ``up`` computes gate and up at once (Phi-3).

    Peak inside ``backward``: five tensors of (T, I) (gate, up, activation, product, its gradient). A gated MLP whose
    weights can be sliced is taken in two parts of I / 2 features, each with all rows of the tile: half the peak, while
    the matrix products keep as many rows as they had.
    """

    gate: LinearOp | None
    up: LinearOp
    down: LinearOp
    act: Activation
    fused: bool = False

    def forward(self, x: Tensor, rows: Rows = slice(None)) -> Tensor:
        """Map rows ``x`` (T, D) to (T, D)."""
        gate, up = self._project(x, rows)
        if gate is None:
            return self.down.forward(self.act.forward(up), rows)
        return self.down.forward(self.act.forward(gate).mul_(up), rows)

    def backward(
        self,
        g: Tensor,
        x: Tensor,
        rows: Rows = slice(None),
        *,
        need_input: bool = True,
        through: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor | None:
        """Gradient (T, D) for rows ``x``, or ``None`` where it is not wanted; the adapters accumulate theirs.

        ``through(g, y)`` turns the gradient behind something that follows the MLP (a post-norm) into the gradient of
        the MLP's output ``y``; only then is the down projection re-run.
        """
        if through is not None or self.gate is None or any(op.weight is None for op in (self.gate, self.up, self.down)):
            return self._backward_part(g, x, rows, need_input=need_input, through=through)
        dx: Tensor | None = None
        for part in tiles(self.down.weight.shape[1], -(-self.down.weight.shape[1] // _FEATURE_PARTS)):
            piece = MlpOp(self.gate.outputs(part), self.up.outputs(part), self.down.inputs(part), self.act)
            d_part = piece._backward_part(g, x, rows, need_input=need_input)
            dx = d_part if dx is None or d_part is None else dx.add_(d_part)
        return dx

    def _backward_part(
        self,
        g: Tensor,
        x: Tensor,
        rows: Rows,
        *,
        need_input: bool,
        through: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor | None:
        gate, up = self._project(x, rows)
        activated = self.act.forward(up if gate is None else gate)
        product = activated if gate is None else activated * up
        if through is not None:
            g = through(g, self.down.forward(product, rows))
        d_product = self.down.backward(g, product, rows)
        assert d_product is not None
        del product
        if gate is None:
            del activated
            return self.up.backward(self.act.backward_(d_product, up), x, rows, need_input=need_input)
        d_up = activated.mul_(d_product)
        d_gate = self.act.backward_(d_product.mul_(up), gate)
        if self.gate is None:
            return self.up.backward(torch.cat((d_gate, d_up), dim=-1), x, rows, need_input=need_input)
        del gate, up
        dx = self.up.backward(d_up, x, rows, need_input=need_input)
        del d_up
        dx_gate = self.gate.backward(d_gate, x, rows, need_input=need_input)
        return dx.add_(dx_gate) if dx is not None and dx_gate is not None else None

    def _project(self, x: Tensor, rows: Rows) -> tuple[Tensor | None, Tensor]:
        if self.fused:
            gate, up = self.up.forward(x, rows).chunk(2, dim=-1)
            return gate, up
        gate_out = self.gate.forward(x, rows) if self.gate is not None else None
        return gate_out, self.up.forward(x, rows)


def tiles(rows: int, size: int) -> Iterator[slice]:
    """Cut ``rows`` rows into consecutive slices of at most ``size`` rows."""
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of one projection: ``a`` (r, Din), ``b`` (Dout, r) and ``scaling`` s."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A frozen projection of the functional MLP: ``weight`` (Dout, Din), optional ``bias`` (Dout,) and ``adapter``."""

    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        ctx.settings = settings
        ctx.present = [t is not None for t in tensors]
        ctx.save_for_backward(x, *[t for t in tensors if t is not None])
        op = _build(settings, tensors, None)
        flat = x.reshape(-1, x.shape[-1])
        y = (
            torch.cat([op.forward(flat[t], t) for t in tiles(len(flat), settings["tile"])])
            if len(flat)
            else flat.clone()
        )
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        stream = iter(saved)
        tensors = [next(stream) if here else None for here in ctx.present]
        need_x, _, *needs = ctx.needs_input_grad
        op = _build(ctx.settings, tensors, needs)
        flat, g_flat = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        dx = torch.zeros_like(flat) if need_x else None
        for t in tiles(len(flat), ctx.settings["tile"]):
            part = op.backward(g_flat[t], flat[t], t, need_input=need_x)
            if dx is not None and part is not None:
                dx[t] = part
        grads: list[Tensor | None] = [None] * len(tensors)
        for index, linear in enumerate(_linears(op)):
            for term in linear.terms:
                a, b = tensors[4 * index + 2], tensors[4 * index + 3]
                assert a is not None and b is not None
                grads[4 * index + 2], grads[4 * index + 3] = term.gradients(a, b)
        return dx.view(x.shape) if dx is not None else None, None, *grads


def _linears(op: MlpOp) -> list[LinearOp]:
    return [op.up, op.down] if op.gate is None else [op.gate, op.up, op.down]


def _build(settings: dict[str, Any], tensors: Sequence[Tensor | None], needs: Sequence[bool] | None) -> MlpOp:
    linears = []
    for index, scaling in enumerate(settings["scalings"]):
        weight, bias, a, b = tensors[4 * index : 4 * index + 4]
        terms = []
        if a is not None and b is not None:
            wanted = (False, False) if needs is None else (needs[4 * index + 2], needs[4 * index + 3])
            terms = [LoraTerm.make(a, b, scaling, None, a.dtype, wanted)]
        linears.append(LinearOp(weight, bias, terms=terms))
    return MlpOp(linears[-3] if len(linears) == 3 else None, linears[-2], linears[-1], settings["act"])


def _apply(x: Tensor, projections: Sequence[Projection], act: Callable[[Tensor], Tensor], tile_tokens: int) -> Tensor:
    if tile_tokens < 1:
        raise ValueError(f"got tile_tokens={tile_tokens}, expected a number of rows >= 1")
    tensors: list[Tensor | None] = []
    for p in projections:
        if p.weight.requires_grad or (p.bias is not None and p.bias.requires_grad):
            raise ValueError(
                "got a projection whose weight or bias wants a gradient, expected frozen ones: this op differentiates "
                "its input and its adapters only. Use plain autograd for trained projections."
            )
        tensors += [p.weight, p.bias, p.adapter.a if p.adapter else None, p.adapter.b if p.adapter else None]
    settings = {
        "scalings": [p.adapter.scaling if p.adapter else 1.0 for p in projections],
        "act": identify_activation(act),
        "tile": tile_tokens,
    }
    return _Mlp.apply(x, settings, *tensors)


def gated_mlp(
    x: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    act: Callable[[Tensor], Tensor],
    tile_tokens: int = 256,
) -> Tensor:
    """``down(act(gate(x)) * up(x))`` with a hand-derived backward in row tiles.

    Args:
        x: (..., D); all tensors share one floating dtype.
        gate, up: (I, D) frozen projections, each with an optional adapter.
        down: (D, I), likewise.
        act: elementwise; SiLU, GELU and tanh-GELU (recognised by value) have their own backward, others run through
            autograd.
        tile_tokens: rows per tile, >= 1; changes memory and the order of sums, nothing else.

    Returns:
        (..., D). Saved for backward: ``x`` and references to the weights, 0 bytes beyond them.

    Raises:
        ValueError: a projection's weight or bias wants a gradient, or ``tile_tokens`` < 1.
    """
    return _apply(x, (gate, up, down), act, tile_tokens)


def plain_mlp(
    x: Tensor, up: Projection, down: Projection, act: Callable[[Tensor], Tensor], tile_tokens: int = 256
) -> Tensor:
    """``down(act(up(x)))``; arguments, saved bytes and errors as ``gated_mlp``."""
    return _apply(x, (up, down), act, tile_tokens)
