"""The structured block: runs a decoder block keeping its input alone, and differentiates it piece by piece.

Forward: projections in row tiles, the layer's own attention, then output projection and MLP in row tiles; nothing but
    the block's input is kept.
Backward (MeSP, arXiv 2602.13069, section 3; the row tiles and the kept rows are ours): projections and attention are
re-run, the attention as the only
piece with a graph; tile by tile the tail (output projection, MLP) is re-run and differentiated by hand; then the
attention's own backward; then the head
(input norm, projections) tile by tile. Alive at the peak: the incoming and outgoing gradient, the attention's
queries, keys, values, output and its gradient, one tile of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from hf_memeff.blocks.arguments import PackedArguments
from hf_memeff.blocks.layouts import Layout, NormConvention, norm_op, part
from hf_memeff.blocks.linear import LinearPlan
from hf_memeff.blocks.store import ActivationStore
from hf_memeff.ops.activations import Activation
from hf_memeff.ops.dropout import DropMask, draw_mask, replayed_rng, save_rng
from hf_memeff.ops.lora_linear import LinearOp
from hf_memeff.ops.mlp import MlpOp
from hf_memeff.ops.norms import NormOp
from hf_memeff.ops.precision import autocast_dtype


@dataclass(frozen=True)
class BlockCall:
    """Everything about one call of a block that is not a tensor.

    Attributes:
        layer: the module being called (a replica or a copy hands in itself).
        layout: its layout.
        conventions: convention of each norm, by the layout's name of it.
        activation: the MLP's activation.
        plans: the projections, by the layout's name of them.
        arguments: the layer's other arguments; their tensors travel through ``save_for_backward``.
        store: where the block's input waits.
        remaining: how many inputs of this size the step still has to store, this one included.
        tile: rows of one tile.
        rows: kept rows T (int64, sorted, indices into the N flattened rows) or ``None`` for all: backward runs over
            them alone, the gradient of every other
            row is the incoming one, and keys and values of other rows are constants.
    """

    layer: nn.Module
    layout: Layout
    conventions: dict[str, NormConvention]
    activation: Activation
    plans: dict[str, LinearPlan]
    arguments: PackedArguments
    store: ActivationStore
    remaining: int
    tile: int
    rows: Tensor | None = None


class _Given(nn.Module):
    """Stands in for a projection whose output is already known."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: Tensor) -> Tensor:
        return self.value


class _GraphStart(torch.autograd.Function):
    """Gives a tensor a place in a graph without being a leaf, so that its storage can be freed once the attention has
    read it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        return None, None


class _GraphEnd(torch.autograd.Function):
    """Starts the attention's backward from a gradient that nobody else holds.

    ``torch.autograd.grad`` keeps its ``grad_outputs`` alive until it returns; a gradient handed over in ``cell`` is
    freed as soon as the attention kernel has read it.
    """

    @staticmethod
    def forward(ctx: Any, attended: Tensor, cell: list[Tensor]) -> Tensor:
        ctx.cell = cell
        return attended.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.cell.pop(), None


def _attend(call: BlockCall, projected: Sequence[Tensor], hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run the layer's own attention on given projections and return what its output projection would read, (B, S, H *
    head size).

    The attention module is copied shallowly, its projections replaced by their known outputs and its output
        projection by the identity: the layer's own forward then
    computes everything between them, with whatever kernel the model is set to. The module itself is not touched.
    """
    layout, attention = call.layout, part(call.layer, call.layout.attention)
    shadow = attention.__new__(type(attention))
    shadow.__dict__ = attention.__dict__.copy()
    modules = attention._modules.copy()
    prefix = len(layout.attention) + 1
    for name, value in zip(layout.projections, projected, strict=True):
        modules[name[prefix:]] = _Given(value)
    modules[layout.output[prefix:]] = nn.Identity()
    if layout.attention_dropout is not None and layout.attention_dropout.startswith(layout.attention + "."):
        modules[layout.attention_dropout[prefix:]] = nn.Identity()
    shadow.__dict__["_modules"] = modules
    output = type(attention).forward(shadow, hidden, **kwargs)
    return output[0] if isinstance(output, tuple) else output


class _Pass:
    """The pieces of a block, made ready for one forward or backward pass."""

    def __init__(
        self, call: BlockCall, hidden: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool] | None
    ) -> None:
        self.call, self.layout, self.device = call, call.layout, hidden.device
        self.count, self.width, self.dtype = hidden.shape[:-1].numel(), hidden.shape[-1], hidden.dtype
        self._tensors, self._needs = tensors, needs
        layer, layout = call.layer, call.layout
        self.input_norm = self._norm(layout.input_norm)
        self.attention_out_norm = self._norm(layout.attention_out_norm)
        self.mlp_norm = self._norm(layout.mlp_norm)
        self.mlp_out_norm = self._norm(layout.mlp_out_norm)
        self.residual_scale = float(getattr(layer, layout.residual_scale)) if layout.residual_scale else 1.0
        self._offsets, position = {}, 0
        for name in layout.linears:
            self._offsets[name] = position
            position += 2 * len(call.plans[name].terms)
        self.ops: dict[str, LinearOp] = {}

    def _norm(self, name: str | None) -> NormOp | None:
        return None if name is None else norm_op(part(self.call.layer, name), self.call.conventions[name])

    def _build(self, name: str) -> LinearOp:
        plan, offset = self.call.plans[name], self._offsets[name]
        stop = offset + 2 * len(plan.terms)
        masks = plan.draw_masks(self.count, self.device)
        needs = None if self._needs is None else iter(self._needs[offset:stop])
        self.ops[name] = plan.build(iter(self._tensors[offset:stop]), masks, self.device.type, needs)
        return self.ops[name]

    def prepare_head(self) -> None:
        """Draw the masks of the input projections, in PEFT's order, and make their ops."""
        self.projections = [self._build(name) for name in self.layout.projections]

    def prepare_tail(self) -> None:
        """Draw the masks of everything behind the attention, in the order the layer draws them, and make the ops."""
        layout = self.layout
        self.output = self._build(layout.output)
        self.attention_mask = self._residual_mask(layout.attention_dropout)
        gate = self._build(layout.gate) if layout.gate is not None else None
        up, down = self._build(layout.up), self._build(layout.down)
        self.mlp = MlpOp(gate, up, down, self.call.activation, layout.fused_gate)
        self.mlp_mask = self._residual_mask(layout.mlp_dropout)

    def _residual_mask(self, name: str | None) -> DropMask | None:
        if name is None:
            return None
        output = self.layout.output if name == self.layout.attention_dropout else self.layout.down
        weight = self.ops[output].weight
        dtype = weight.dtype if weight is not None else autocast_dtype(self.device.type) or self.dtype
        return draw_mask(part(self.call.layer, name), self.count, self.width, dtype, self.device)

    def _branch(self, x: Tensor, mask: DropMask | None, rows: slice | Tensor) -> Tensor:
        """What a branch adds to the residual stream: dropout, then the residual scale. Linear, so it is its own
        transpose.
        """
        if mask is not None:
            x = mask.apply(x, rows)
        return x * self.residual_scale if self.residual_scale != 1.0 else x

    def head(self, h: Tensor, rows: slice | Tensor) -> list[Tensor]:
        """Input norm and projections of rows ``h`` (T, D)."""
        x = h if self.input_norm is None else self.input_norm.forward(h)
        return [op.forward(x, rows) for op in self.projections]

    def _after_attention(self, h: Tensor, attended: Tensor, rows: slice | Tensor) -> tuple[Tensor | None, Tensor]:
        """The projected attention output where a post-norm needs it in backward, and the residual stream behind it."""
        o = self.output.forward(attended, rows)
        if self.attention_out_norm is None:
            return None, h + self._branch(o, self.attention_mask, rows)
        return o, h + self._branch(self.attention_out_norm.forward(o), self.attention_mask, rows)

    def tail(self, h: Tensor, attended: Tensor, rows: slice | Tensor) -> Tensor:
        """Output projection and MLP of rows: ``h`` (T, D), ``attended`` (T, H * head size) -> block output (T, D)."""
        _, h1 = self._after_attention(h, attended, rows)
        x = h1 if self.mlp_norm is None else self.mlp_norm.forward(h1)
        m = self.mlp.forward(x, rows)
        if self.mlp_out_norm is not None:
            m = self.mlp_out_norm.forward(m)
        return h1 + self._branch(m, self.mlp_mask, rows)

    def tail_backward(self, g: Tensor, h: Tensor, attended: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``tail``: for the residual stream at ``h`` (T, D) and for ``attended``."""
        o, h1 = self._after_attention(h, attended, rows)
        x = h1 if self.mlp_norm is None else self.mlp_norm.forward(h1)
        norm = self.mlp_out_norm
        through = (lambda dm, m: norm.backward(dm, m)) if norm is not None else None
        dx = self.mlp.backward(self._branch(g, self.mlp_mask, rows), x, rows, through=through)
        assert dx is not None
        dh = g + (dx if self.mlp_norm is None else self.mlp_norm.backward(dx, h1)).to(g.dtype)
        do = self._branch(dh, self.attention_mask, rows)
        if self.attention_out_norm is not None and o is not None:
            do = self.attention_out_norm.backward(do, o)
        d_attended = self.output.backward(do, attended, rows)
        assert d_attended is not None
        return dh, d_attended

    def head_backward(
        self, gradients: Sequence[Tensor], h: Tensor, rows: slice | Tensor, *, need_input: bool
    ) -> Tensor | None:
        """What the projections add to the gradient of rows ``h`` (T, D), or ``None`` where it is not wanted."""
        x = h if self.input_norm is None else self.input_norm.forward(h)
        total: Tensor | None = None
        for op, g in zip(self.projections, gradients, strict=True):
            dx = op.backward(g, x, rows, need_input=need_input)
            total = dx if total is None or dx is None else total.add_(dx)
        if total is None or self.input_norm is None:
            return total
        return self.input_norm.backward(total, h)

    def gradients(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The accumulated adapter gradients, in the order of ``tensors`` and in their dtypes."""
        stream = iter(tensors)
        found: list[Tensor | None] = []
        for name in self.layout.linears:
            for term in self.ops[name].terms:
                found += term.gradients(next(stream), next(stream))
        return found


def _row_tiles(count: int, rows: Tensor | None, size: int) -> Iterator[slice | Tensor]:
    if rows is not None:
        yield from rows.split(size)
        return
    for start in range(0, max(count, 1), size):  # one empty tile for no rows, whose results have the right widths
        yield slice(start, min(start + size, count))


def _project(pass_: _Pass, flat: Tensor, shape: torch.Size) -> list[Tensor]:
    """Head of all rows in tiles, each projection gathered in one tensor (B, S, width)."""
    whole: list[Tensor] = []
    for rows in _row_tiles(len(flat), None, 2 * pass_.call.tile):
        outputs = pass_.head(flat[rows], rows)
        if not whole:
            whole = [torch.empty(len(flat), o.shape[-1], dtype=o.dtype, device=o.device) for o in outputs]
        for target, output in zip(whole, outputs, strict=True):
            target[rows] = output
    return [w.view(*shape[:-1], w.shape[-1]) for w in whole]


class StructuredBlock(torch.autograd.Function):
    """One decoder block. Inputs: the hidden states, a ``BlockCall``, the adapter tensors (A, Bm per adapter), the
    tensors among the layer's other arguments.

    Saved for backward: the block input as the store keeps it, references to the adapter tensors and to the arguments'
        tensors (shared by all blocks), 5,056 bytes
    of generator state and the accelerator's. Their number and shapes depend on shapes and configuration alone.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: BlockCall, adapter_count: int, *tensors: Tensor) -> Tensor:
        states = save_rng(hidden.device)
        ctx.call, ctx.adapter_count, ctx.state_count = call, adapter_count, len(states)
        ctx.autocast = autocast_dtype(hidden.device.type)
        saved = call.store.put(hidden, call.remaining)
        ctx.save_for_backward(saved, *states, *tensors)
        adapters, others = tensors[:adapter_count], tensors[adapter_count:]
        flat = hidden.reshape(-1, hidden.shape[-1])
        pass_ = _Pass(call, hidden, adapters, None)
        pass_.prepare_head()
        attended = _attend(call, _project(pass_, flat, hidden.shape), hidden, call.arguments.unpack(others))
        attended = attended.flatten(0, -2)
        pass_.prepare_tail()
        output: Tensor | None = None  # allocated in its final shape: FSDP2 warns of a block that returns a view
        # a forward pass holds less than a backward pass at its peak, so its tiles may be twice as tall
        for rows in _row_tiles(len(flat), None, 2 * call.tile):
            y = pass_.tail(flat[rows], attended[rows], rows)
            if output is None:
                output = torch.empty(hidden.shape, dtype=y.dtype, device=y.device)
            output.view(len(flat), -1)[rows] = y
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call: BlockCall = ctx.call
        saved, *rest = ctx.saved_tensors
        states, tensors = rest[: ctx.state_count], rest[ctx.state_count :]
        adapters, others = tensors[: ctx.adapter_count], tensors[ctx.adapter_count :]
        needs_input, _, _, *needs = ctx.needs_input_grad
        hidden = call.store.get(saved, g.device)
        with (
            replayed_rng(states, g.device),
            torch.autocast(g.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None),
        ):
            pass_ = _Pass(call, hidden, adapters, needs[: ctx.adapter_count])
            d_hidden = _backward(pass_, g, hidden, call.arguments.unpack(others), need_input=needs_input)
        grads = pass_.gradients(adapters)
        return d_hidden, None, None, *grads, *[None] * len(others)


def _backward(pass_: _Pass, g: Tensor, hidden: Tensor, kwargs: dict[str, Any], *, need_input: bool) -> Tensor | None:
    call = pass_.call
    flat, g_flat = hidden.reshape(-1, hidden.shape[-1]), g.reshape(-1, g.shape[-1])
    pass_.prepare_head()
    if len(flat) == 0:
        pass_.prepare_tail()
        return torch.zeros_like(hidden) if need_input else None
    values, end, cell, edges = _attend_with_graph(call, _project(pass_, flat, hidden.shape), hidden, kwargs)
    pass_.prepare_tail()
    kept, shape = call.rows, values.shape
    values = values.reshape(len(flat), -1)
    dh = torch.empty_like(g_flat) if kept is None else g_flat.clone()
    d_attended = torch.empty_like(values) if kept is None else torch.zeros_like(values)
    for rows in _row_tiles(len(flat), kept, call.tile):
        dh[rows], d_attended[rows] = pass_.tail_backward(g_flat[rows], flat[rows], values[rows], rows)
    cell.append(d_attended.view(shape))
    del values, d_attended
    gradients = [d.reshape(len(flat), -1) for d in torch.autograd.grad(end, edges)]
    del end
    for rows in _row_tiles(len(flat), kept, call.tile):
        part_ = pass_.head_backward([d[rows] for d in gradients], flat[rows], rows, need_input=need_input)
        if part_ is not None:
            dh[rows] += part_
    return dh.view(hidden.shape).to(hidden.dtype) if need_input else None


def _attend_with_graph(
    call: BlockCall, projected: list[Tensor], hidden: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor], list[Any]]:
    """The attention with a graph of its own.

    Returns:
        What the output projection reads, (B, S, H * head size), without graph; the graph's end; the cell that takes
        the gradient of the first; the places in the graph where
        the gradients of the projections arrive.
    """
    cell: list[Tensor] = []
    with torch.enable_grad():
        anchor = torch.zeros((), device=hidden.device, requires_grad=True)
        started = [_GraphStart.apply(anchor, p) for p in projected]
        projected.clear()
        edges = [get_gradient_edge(s) for s in started]
        attended = _attend(call, started, hidden.detach(), kwargs)
        end = _GraphEnd.apply(attended, cell)
    return attended.detach(), end, cell, edges
