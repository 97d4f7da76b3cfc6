"""The pieces of a block between which its passes run: norms, projections, MLP and masks, made for one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hf_memeff.blocks.arguments import PackedArguments
from hf_memeff.blocks.layouts import Layout, NormConvention, norm_op, part
from hf_memeff.blocks.linear import LinearPlan
from hf_memeff.blocks.store import ActivationStore
from hf_memeff.ops.activations import Activation
from hf_memeff.ops.dropout import DropMask, draw_mask
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


class Pass:
    """The pieces of a block, made ready for one forward or backward pass.

    Args:
        call: the block's call.
        hidden: hidden states in the block's dtype and on its device, (..., D).
        count: N, all rows of the call: dropout masks are drawn whole.
        tensors: the adapter tensors, A and Bm of each term.
        needs: which of them want a gradient; ``None`` in a forward pass.
    """

    def __init__(
        self, call: BlockCall, hidden: Tensor, count: int, tensors: Sequence[Tensor], needs: Sequence[bool] | None
    ) -> None:
        self.call, self.layout, self.device = call, call.layout, hidden.device
        self.count, self.width, self.dtype = count, hidden.shape[-1], hidden.dtype
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
        self.projections: list[LinearOp] = []

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
        """Draw the masks of the input projections, in PEFT's order, and make their ops; once, however often called."""
        self.projections = self.projections or [self._build(name) for name in self.layout.projections]

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
