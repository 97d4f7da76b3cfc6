"""Decoder layers and layouts that are wrong on purpose: what the self-check must tell from the right ones.

A wrong layer is a subclass, so that its layout is found by its base class, but computes something else. A wrong layout
describes a right layer badly. A wrong engine is the engine with one mistake in its maths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_memeff.blocks import attach, layouts, passes
from hf_memeff.blocks.layouts import Layout
from hf_memeff.ops import lora_linear
from hf_memeff.ops.norms import NormOp


def turn_into(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module a subclass of its class with another forward; ``forward(super_forward, self, *args)``."""
    parent: Any = type(module)

    @functools.wraps(parent.forward)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(lambda *a, **k: parent.forward(self, *a, **k), self, *args, **kwargs)

    module.__class__ = type(f"Wrong{parent.__name__}", (parent,), {"forward": changed})


def _halved(own: Any, layer: Any, h: Tensor, *args: Any, **kwargs: Any) -> Any:
    y = own(h, *args, **kwargs)
    first = y[0] if isinstance(y, tuple) else y
    first = h + 0.5 * (first - h)
    return (first, *y[1:]) if isinstance(y, tuple) else first


def half_residual(layer: nn.Module, layout: Layout) -> None:
    """A residual multiplier that the layout does not know."""
    turn_into(layer, _halved)


def swapped_norms(layer: nn.Module, layout: Layout) -> None:
    """The block's two norms (or post-norms) in each other's place."""
    first, second = (
        (layout.input_norm, layout.mlp_norm) if layout.input_norm else (layout.attention_out_norm, layout.mlp_out_norm)
    )

    def forward(own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        modules = layer._modules
        modules[first], modules[second] = modules[second], modules[first]
        try:
            return own(*args, **kwargs)
        finally:
            modules[first], modules[second] = modules[second], modules[first]

    turn_into(layer, forward)


def doubled_mlp(layer: nn.Module, layout: Layout) -> None:
    """A scale behind the MLP."""
    turn_into(layer.get_submodule(layout.mlp), lambda own, mlp, x: 2.0 * own(x))


def mlp_reads_the_residual(layer: nn.Module, layout: Layout) -> None:
    """A second residual connection, around the MLP alone."""
    turn_into(layer.get_submodule(layout.mlp), lambda own, mlp, x: x + own(x))


def gate_and_up_swapped(layer: nn.Module, layout: Layout) -> None:
    """The activation on the other projection."""
    if layout.gate is None:
        pytest.skip("gate and up are one projection or there is no gate")

    def forward(own: Any, mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))

    turn_into(layer.get_submodule(layout.mlp), forward)


def undropped_branch(layer: nn.Module, layout: Layout) -> None:
    """An adapter that leaves its dropout out, as the last projection of the block."""

    def forward(own: Any, linear: Any, x: Tensor) -> Tensor:
        dropouts = linear._modules["lora_dropout"]
        linear._modules["lora_dropout"] = nn.ModuleDict({name: nn.Identity() for name in dropouts})
        try:
            return own(x)
        finally:
            linear._modules["lora_dropout"] = dropouts

    turn_into(layer.get_submodule(layout.down), forward)


def half_scaled_branch(layer: nn.Module, layout: Layout) -> None:
    """An adapter with another scaling than it says."""

    def forward(own: Any, linear: Any, x: Tensor) -> Tensor:
        base = linear.base_layer(x)
        return base + 0.5 * (own(x) - base)

    turn_into(layer.get_submodule(layout.projections[-1]), forward)


WRONG_LAYERS = {
    f.__name__: f
    for f in (
        half_residual,
        swapped_norms,
        doubled_mlp,
        mlp_reads_the_residual,
        gate_and_up_swapped,
        undropped_branch,
        half_scaled_branch,
    )
}


def wrong_layouts(layout: Layout) -> dict[str, Layout]:
    """Copies of a layout with one mistake each, by what is wrong."""
    found = {}
    if layout.residual_scale:
        found["no residual multiplier"] = replace(layout, residual_scale=None)
    if layout.input_norm and layout.mlp_norm:
        found["norms swapped"] = replace(layout, input_norm=layout.mlp_norm, mlp_norm=layout.input_norm)
        found["no input norm"] = replace(layout, input_norm=None)
        found["no norm before the MLP"] = replace(layout, mlp_norm=None)
    if layout.attention_out_norm and layout.mlp_out_norm:
        swapped = {"attention_out_norm": layout.mlp_out_norm, "mlp_out_norm": layout.attention_out_norm}
        found["post-norms swapped"] = replace(layout, **swapped)
        found["no norm behind the attention"] = replace(layout, attention_out_norm=None)
        found["no norm behind the MLP"] = replace(layout, mlp_out_norm=None)
    if layout.gate:
        found["gate and up swapped"] = replace(layout, gate=layout.up, up=layout.gate)
        found["no gate"] = replace(layout, gate=None)
    if layout.fused_gate:
        found["fused projection read as plain"] = replace(layout, fused_gate=False)
    if len(layout.projections) == 3:
        q, k, v = layout.projections
        found["keys and values in another order of dropout masks"] = replace(layout, projections=(q, v, k))
    if layout.attention_dropout:
        found["no residual dropout behind the attention"] = replace(layout, attention_dropout=None)
        found["no residual dropout behind the MLP"] = replace(layout, mlp_dropout=None)
    return found


def _wrong_term(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = lora_linear.LoraTerm.backward

    def undropped(self: Any, x: Tensor, rows: Any) -> Tensor:
        return x.to(self.a.dtype)

    def wrong(self: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(lora_linear.LoraTerm, "input", undropped)
            return backward(self, *args)

    monkeypatch.setattr(lora_linear.LoraTerm, "backward", wrong)


def _wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_memeff.blocks import block

    right = block.plan_linear

    def wrong(module: nn.Module) -> Any:
        plan = right(module)
        if isinstance(plan, str) or not plan.terms:
            return plan
        return replace(plan, terms=tuple(replace(t, scaling=1.1 * t.scaling) for t in plan.terms))

    monkeypatch.setattr(block, "plan_linear", wrong)


def _wrong_norm_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mean_term(self: Any, g: Tensor, x: Tensor) -> Tensor:
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return (g * (self.offset + self.weight.float()) * inverse).to(x.dtype)

    monkeypatch.setattr(NormOp, "backward", without_mean_term)


def _wrong_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layouts.norm_convention

    def wrong(norm: nn.Module) -> Any:
        found = right(norm)
        return None if found is None else replace(found, offset=1.0 - found.offset)

    monkeypatch.setattr(attach, "norm_convention", wrong)


def _wrong_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    right = passes.Pass._branch

    def unmasked(self: Any, x: Tensor, mask: Any, rows: Any) -> Tensor:
        return right(self, x, None, rows)

    monkeypatch.setattr(passes.Pass, "_branch", unmasked)


def _wrong_attention_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.autograd.grad

    def without_the_last(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = right(outputs, inputs, *args, **kwargs)
        if isinstance(inputs, list) and inputs and not isinstance(inputs[0], Tensor):
            return (*found[:-1], torch.zeros_like(found[-1]))
        return found

    monkeypatch.setattr(torch.autograd, "grad", without_the_last)


WRONG_ENGINES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "dA without dropout": ("llama", _wrong_term),
    "a scaling that is 10 % off": ("llama", _wrong_plan),
    "a norm's gradient without its mean term": ("llama", _wrong_norm_gradient),
    "1 + w left out": ("gemma2", _wrong_convention),
    "1 + w left out of Gemma 3": ("gemma3", _wrong_convention),
    "1 + w where it is w": ("olmo2", _wrong_convention),
    "a residual dropout skipped": ("gpt2", _wrong_branch),
    "the values' gradient lost": ("qwen2", _wrong_attention_gradient),
}
"""One mistake in the engine each, with a family whose check must notice."""
