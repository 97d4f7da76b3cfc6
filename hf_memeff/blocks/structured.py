"""The structured block: runs a decoder block keeping its input alone, and differentiates it piece by piece.

Forward: projections in row tiles, the layer's own attention, then output projection and MLP in row tiles; nothing but
the block's input is kept.

Backward (MeSP, arXiv 2602.13069, section 3; the row tiles are ours): projections and attention are re-run, the
attention as the only piece with a graph; tile by tile the tail (output projection, MLP) is re-run and differentiated by
hand; then the attention's own backward; then the head (input norm, projections) tile by tile. Alive at the peak: the
incoming and outgoing gradient, the attention's queries, keys, values, output and its gradient, one tile of the MLP.

The same passes run over the rows that ``salient`` keeps (SAGE): they take any rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from hf_memeff.blocks.attention_probe import Handler, install
from hf_memeff.blocks.layouts import part
from hf_memeff.blocks.passes import BlockCall, Pass
from hf_memeff.ops.dropout import replayed_rng, save_rng
from hf_memeff.ops.precision import autocast_dtype


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


def attend(
    call: BlockCall,
    projected: Sequence[Tensor],
    hidden: Tensor,
    kwargs: dict[str, Any],
    handler: Handler | None = None,
) -> Tensor:
    """Run the layer's own attention on given projections; returns what its output projection would read, (B, S, H dv).

    The attention module is copied shallowly, its projections replaced by their known outputs and its output projection
    by the identity: the layer's own forward then computes everything between them, with whatever kernel the model is
    set to. The module itself is not touched. ``handler`` takes the place of the attention function inside.
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
    if handler is not None:
        install(shadow, handler)
    output = type(attention).forward(shadow, hidden, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def _tiles(count: int, size: int, index: Tensor | None = None) -> Iterator[tuple[slice, slice | Tensor]]:
    """Tiles of rows: where they are, and which of the call's rows they are (``index``, or the same)."""
    for start in range(0, max(count, 1), size):  # one empty tile for no rows, whose results have the right widths
        tile = slice(start, min(start + size, count))
        yield tile, tile if index is None else index[tile]


def project(pass_: Pass, flat: Tensor, shape: torch.Size, index: Tensor | None = None) -> list[Tensor]:
    """Head of rows in tiles, each projection gathered in one tensor of shape (B, S, width).

    Args:
        pass_: the block's pieces, head prepared.
        flat: (M, D), hidden states.
        shape: (B, S, D) with B S = M.
        index: (M,) int64, which of the call's rows these are; ``None`` for all of them in order.
    """
    whole: list[Tensor] = []
    # a forward pass holds less than a backward pass at its peak, so its tiles may be twice as tall
    for tile, rows in _tiles(len(flat), 2 * pass_.call.tile, index):
        outputs = pass_.head(flat[tile], rows)
        if not whole:
            whole = [torch.empty(len(flat), o.shape[-1], dtype=o.dtype, device=o.device) for o in outputs]
        for target, output in zip(whole, outputs, strict=True):
            target[tile] = output
    return [w.view(*shape[:-1], w.shape[-1]) for w in whole]


def block_forward(pass_: Pass, hidden: Tensor, kwargs: dict[str, Any], handler: Handler | None = None) -> Tensor:
    """The block's output for all rows, (B, S, D), without graph."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    pass_.prepare_head()
    attended = attend(pass_.call, project(pass_, flat, hidden.shape), hidden, kwargs, handler).flatten(0, -2)
    pass_.prepare_tail()
    output: Tensor | None = None  # allocated in its final shape: FSDP2 warns of a block that returns a view
    for tile, rows in _tiles(len(flat), 2 * pass_.call.tile):
        y = pass_.tail(flat[tile], attended[tile], rows)
        if output is None:
            output = torch.empty(hidden.shape, dtype=y.dtype, device=y.device)
        output.view(len(flat), -1)[tile] = y
    assert output is not None
    return output


def block_backward(
    pass_: Pass,
    g: Tensor,
    hidden: Tensor,
    kwargs: dict[str, Any],
    *,
    need_input: bool,
    index: Tensor | None = None,
    handler: Handler | None = None,
    kept: Tensor | None = None,
    projected: list[Tensor] | None = None,
) -> Tensor | None:
    """Differentiate the block for the rows it is given.

    Args:
        pass_: the block's pieces, made for a backward pass; adapter gradients accumulate there.
        g: (B, K, D), incoming gradient of these rows.
        hidden: (B, K, D), the block's input at these rows.
        kwargs: the layer's other arguments, for these rows.
        need_input: whether the input's gradient is wanted.
        index: (B K,) int64, which of the call's rows they are; ``None`` for all of them in order.
        handler: stands for the attention function.
        kept: (T,) int64 or ``None``: the attention runs on all rows, but only these go backward; the others'
            queries, keys and values are constants, and their gradient is the incoming one.
        projected: the projections of these rows, (B, K, width) each, where they are at hand; emptied on the way.

    Returns:
        The gradient of ``hidden``, (B, K, D), or ``None``.
    """
    call = pass_.call
    flat, g_flat = hidden.reshape(-1, hidden.shape[-1]), g.reshape(-1, g.shape[-1])
    pass_.prepare_head()
    if len(flat) == 0:
        pass_.prepare_tail()
        return torch.zeros_like(hidden) if need_input else None
    projected = projected or project(pass_, flat, hidden.shape, index)
    values, end, cell, edges = attend_with_graph(call, projected, hidden, kwargs, handler)
    pass_.prepare_tail()
    shape = values.shape
    values = values.reshape(len(flat), -1)
    dh = torch.empty_like(g_flat) if kept is None else g_flat.clone()
    d_attended = torch.empty_like(values) if kept is None else torch.zeros_like(values)
    tiles = list(_tiles(len(flat), call.tile, index)) if kept is None else [(t, t) for t in kept.split(call.tile)]
    for tile, rows in tiles:
        dh[tile], d_attended[tile] = pass_.tail_backward(g_flat[tile], flat[tile], values[tile], rows)
    cell.append(d_attended.view(shape))
    del values, d_attended
    gradients = [d.reshape(len(flat), -1) for d in torch.autograd.grad(end, edges)]
    del end
    for tile, rows in tiles:
        part_ = pass_.head_backward([d[tile] for d in gradients], flat[tile], rows, need_input=need_input)
        if part_ is not None:
            dh[tile] += part_
    return dh.view(hidden.shape).to(hidden.dtype) if need_input else None


def attend_with_graph(
    call: BlockCall,
    projected: list[Tensor],
    hidden: Tensor,
    kwargs: dict[str, Any],
    handler: Handler | None = None,
) -> tuple[Tensor, Tensor, list[Tensor], list[Any]]:
    """The attention with a graph of its own.

    Returns:
        What the output projection reads, (B, S, H dv), without graph; the graph's end; the cell that takes the gradient
        of the first; the places in the graph where the gradients of the projections arrive.
    """
    cell: list[Tensor] = []
    with torch.enable_grad():
        anchor = torch.zeros((), device=hidden.device, requires_grad=True)
        started = [_GraphStart.apply(anchor, p) for p in projected]
        projected.clear()
        edges = [get_gradient_edge(s) for s in started]
        attended = attend(call, started, hidden.detach(), kwargs, handler)
        end = _GraphEnd.apply(attended, cell)
    return attended.detach(), end, cell, edges


class StructuredBlock(torch.autograd.Function):
    """One decoder block. Inputs: the hidden states, a ``BlockCall``, the adapter tensors (A, Bm per adapter), the
    tensors among the layer's other arguments.

    Saved for backward: the block input as the store keeps it, references to the adapter tensors and to the arguments'
    tensors (shared by all blocks), 5,056 bytes of generator state and the accelerator's. Their number and shapes depend
    on shapes and configuration alone.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: BlockCall, adapter_count: int, *tensors: Tensor) -> Tensor:
        states = save_rng(hidden.device)
        ctx.call, ctx.adapter_count, ctx.state_count = call, adapter_count, len(states)
        ctx.autocast = autocast_dtype(hidden.device.type)
        saved = call.store.put(hidden, call.remaining)
        ctx.save_for_backward(saved, *states, *tensors)
        adapters, others = tensors[:adapter_count], tensors[adapter_count:]
        pass_ = Pass(call, hidden, hidden.shape[:-1].numel(), adapters, None)
        return block_forward(pass_, hidden, call.arguments.unpack(others))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call: BlockCall = ctx.call
        saved, *rest = ctx.saved_tensors
        states, tensors = rest[: ctx.state_count], rest[ctx.state_count :]
        adapters, others = tensors[: ctx.adapter_count], tensors[ctx.adapter_count :]
        needs_input, _, _, *needs = ctx.needs_input_grad
        hidden = call.store.get(saved, g.device)
        with replayed(states, g.device, ctx.autocast):
            pass_ = Pass(call, hidden, hidden.shape[:-1].numel(), adapters, needs[: ctx.adapter_count])
            d_hidden = block_backward(pass_, g, hidden, call.arguments.unpack(others), need_input=needs_input)
        grads = pass_.gradients(adapters)
        return d_hidden, None, None, *grads, *[None] * len(others)


@contextmanager
def replayed(states: list[Tensor], device: torch.device, autocast: torch.dtype | None) -> Iterator[None]:
    """Run a backward pass with the generators and the autocast of its forward pass."""
    with replayed_rng(states, device), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        yield
