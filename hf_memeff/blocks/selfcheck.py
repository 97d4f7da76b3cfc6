"""Does the structured block compute what the layer computes? Asked once per distinct layout, on a short random input,
before it is used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_memeff.blocks.batch_tokens import BatchTokens
from hf_memeff.blocks.layouts import Layout, part
from hf_memeff.blocks.linear import LinearPlan
from hf_memeff.blocks.options import SalientTokens
from hf_memeff.blocks.salient import SalientCall
from hf_memeff.ops.dropout import replayed_rng, save_rng


class CheckedForward(Protocol):
    """What the check needs of an attached forward (``BlockForward``)."""

    layout: Layout | None
    salient: SalientTokens | None

    def path(self, layer: nn.Module) -> tuple[str, str, dict[str, LinearPlan] | None]: ...

    def original(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any: ...

    def structured(
        self,
        layer: nn.Module,
        hidden: Tensor,
        others: dict[str, Any],
        plans: dict[str, LinearPlan],
        salient: SalientCall | None = None,
    ) -> Tensor: ...


_one_at_a_time = threading.RLock()
_BATCH, _TOKENS = 2, 7  # short, odd, and more than one sequence

# Largest relative error (norm of the difference over the norm) that is rounding, by the coarsest dtype the layer
# computes in: a wrong formula shows as 1e-1 or more
# on the perturbed weights below, while two orders of summation differ by less than these.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def needs_weights(layer: nn.Module) -> bool:
    """Whether the layer's weights are not here yet (meta device, sharded, offloaded), so that the check has to wait
    for the first forward.
    """
    return any(p.is_meta or type(p.data) is not Tensor or hasattr(p, "ds_id") for p in layer.parameters())


def check_block(forward: CheckedForward, layer: nn.Module) -> str:
    """Compare the structured block's output and gradients with the layer's own.

    The adapters get random factors, a scaling of their own and dropout, the norms get random weights, all for the check
    alone: with LoRA's initial ``B = 0`` and norms of ones most mistakes would cancel. Afterwards every parameter is the
    tensor it was, and random state, gradients, modes and hooks are untouched.

    Args:
        forward: the layer's attached forward, with a layout.
        layer: the decoder layer, weights on their device.

    Returns:
        An empty string, or what differs and by how much.
    """
    return _check(forward, layer, None)


def check_salient(forward: CheckedForward, layer: nn.Module) -> str:
    """Compare the salient block with the layer as ``check_block`` does, every token being kept: then it has to be
    exact.

    Args:
        forward: the layer's attached forward, with a layout and ``salient`` settings.
        layer: the decoder layer, weights on their device.

    Returns:
        An empty string, or what is wrong.
    """
    assert forward.salient is not None
    return _check(forward, layer, SalientCall(replace(forward.salient, token_budget=1.0), BatchTokens()))


def _check(forward: CheckedForward, layer: nn.Module, salient: SalientCall | None) -> str:
    with _one_at_a_time:  # two threads would draw from each other's generator
        return _compare(forward, layer, salient)


def _compare(forward: CheckedForward, layer: nn.Module, salient: SalientCall | None) -> str:
    device, dtype = _compute_place(layer)
    states = save_rng(device)
    generator = torch.Generator().manual_seed(20251130)
    autocast_off = torch.autocast(device.type, enabled=False)
    try:
        with ExitStack() as stack:
            stack.enter_context(replayed_rng(states, device))
            stack.enter_context(autocast_off)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_quiet_hooks(layer))
            dtype = stack.enter_context(_wide_on_cpu(layer, dtype))
            stack.enter_context(_perturbed(layer, forward, generator))
            _, reason, plans = forward.path(layer)
            if plans is None:
                return reason
            hidden = _random((_BATCH, _TOKENS, _width(layer, forward)), generator, dtype, device)
            others = _arguments(layer, forward, generator, dtype, device)
            weights: list[Tensor] = [p for p in layer.parameters() if p.requires_grad]
            expected = _run(lambda h: forward.original(layer, h, **others), hidden, weights)
            got = _run(lambda h: forward.structured(layer, h, others, plans, salient), hidden, weights)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        message = str(error).splitlines()[0][:160] if str(error) else ""
        return f"the self-check could not run it ({type(error).__name__}: {message})"
    tolerance = max(_TOLERANCE.get(p.dtype, 6e-2) for p in [hidden, *weights, *_floating(layer)])
    if salient is not None:  # models compute their softmax in float32 even in a float64 model
        tolerance = max(tolerance, _TOLERANCE[torch.float32])
    names = ["the output", "the input's gradient", *[n for n, p in layer.named_parameters() if p.requires_grad]]
    for name, a, b in zip(names, expected, got, strict=True):
        error_ = _relative_error(a, b)
        if not error_ <= tolerance:
            return f"the self-check found {name} off by {error_:.1e} (rounding is below {tolerance:.0e})"
    return ""


def _run(function: Any, hidden: Tensor, weights: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    leaf = hidden.clone().requires_grad_()
    output = function(leaf)
    output = output[0] if isinstance(output, tuple) else output
    weighting = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    return [output, *torch.autograd.grad(output, [leaf, *weights], weighting, allow_unused=True)]


def _relative_error(expected: Tensor | None, got: Tensor | None) -> float:
    if expected is None or got is None:
        return 0.0 if expected is got else float("inf")
    a, b = expected.detach().double(), got.detach().double()
    return float((a - b).norm() / a.norm().clamp_min(1e-12))


def _floating(layer: nn.Module) -> list[Tensor]:
    return [p for p in layer.parameters() if p.is_floating_point()]


def _compute_place(layer: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device of the layer, and the dtype its hidden states have: that of its base norms, else of its first floating
    weight.
    """
    floating = [(n, p) for n, p in layer.named_parameters() if p.is_floating_point() and "lora_" not in n]
    for _, p in floating:
        if p.dim() == 1:
            return p.device, p.dtype
    return floating[0][1].device, floating[0][1].dtype


def _width(layer: nn.Module, forward: CheckedForward) -> int:
    assert forward.layout is not None
    for name in forward.layout.norms:
        return int(part(layer, name).weight.shape[0])
    raise ValueError(f"layout {forward.layout.name} has no norm to read the hidden size from")


def _arguments(
    layer: nn.Module, forward: CheckedForward, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments as the model would pass them: random rotary angles where the layer takes some, positions, no mask."""
    assert forward.layout is not None
    positions = torch.arange(_TOKENS, device=device)[None]
    others: dict[str, Any] = {"attention_mask": None}
    if "position_embeddings" in _keywords(layer):
        size = getattr(part(layer, forward.layout.attention), "head_dim", None)
        half = torch.rand(1, _TOKENS, size // 2, generator=generator) * 6.0
        angles = torch.cat((half, half), dim=-1)
        others["position_embeddings"] = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        others["position_ids"] = positions
    return others


def _keywords(layer: nn.Module) -> tuple[str, ...]:
    return tuple(signature(type(layer).forward).parameters)


def _random(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=generator).to(device, dtype)


@contextmanager
def _wide_on_cpu(layer: nn.Module, dtype: torch.dtype) -> Iterator[torch.dtype]:
    """On a CPU run the check of a half-precision layer in float32: there half precision is slow, and it hides more.

    A 7B model's layer takes 0.8 GB for the moment, and seconds less. Layers with other dtypes (quantised) stay as
    they are.
    """
    halves = [p for p in layer.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    plain = all(p.device.type == "cpu" and p.is_floating_point() for p in layer.parameters())
    if not halves or not plain:
        yield dtype
        return
    undo: list[Any] = []
    try:
        for parameter in halves:
            _swap_data(parameter, parameter.data.float(), undo)
        yield torch.float32
    finally:
        for function, arguments in reversed(undo):
            function(*arguments)


@contextmanager
def _perturbed(layer: nn.Module, forward: CheckedForward, generator: torch.Generator) -> Iterator[None]:
    """Random adapter factors, scalings, dropout and norm weights for the duration; the same tensors and modules come
    back.
    """
    assert forward.layout is not None
    undo: list[Any] = []
    modes = [(m, m.training) for m in layer.modules()]
    try:
        for module in layer.modules():
            module.training = True
        for module in list(layer.modules()):
            if hasattr(module, "lora_A"):
                _perturb_adapter(module, generator, undo)
        for weight in [p for m in layer.modules() for p in m.parameters(recurse=False) if p.dim() == 1]:
            noise = _random(tuple(weight.shape), generator, weight.dtype, weight.device)
            _swap_data(weight, noise.mul_(0.3).add_(weight.data), undo)
        for name in forward.layout.dropouts:
            dropout = part(layer, name)
            if isinstance(dropout, nn.Dropout):
                undo.append((setattr, (dropout, "p", dropout.p)))
                dropout.p = 0.25
        yield
    finally:
        for function, arguments in reversed(undo):
            function(*arguments)
        for module, training in modes:
            module.training = training


def _perturb_adapter(module: Any, generator: torch.Generator, undo: list[Any]) -> None:
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        for factors in (module.lora_A, module.lora_B):
            weight = factors[adapter].weight
            _swap_data(weight, _random(tuple(weight.shape), generator, weight.dtype, weight.device).mul_(0.2), undo)
        scaling: dict[str, float] = module.scaling
        undo.append((scaling.__setitem__, (adapter, scaling[adapter])))
        scaling[adapter] = 0.37
        if type(module.lora_dropout[adapter]) in (nn.Identity, nn.Dropout):
            undo.append((module.lora_dropout.__setitem__, (adapter, module.lora_dropout[adapter])))
            module.lora_dropout[adapter] = nn.Dropout(0.25)


def _swap_data(parameter: Tensor, data: Tensor, undo: list[Any]) -> None:
    undo.append((setattr, (parameter, "data", parameter.data)))
    parameter.data = data


@contextmanager
def _quiet_hooks(layer: nn.Module) -> Iterator[None]:
    """Keep the users' hooks on the layer's modules from seeing the check."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    saved = [(m, n, m.__dict__[n]) for m in layer.modules() for n in names]
    try:
        for module, name, hooks in saved:
            if hooks:
                module.__dict__[name] = OrderedDict()
        yield
    finally:
        for module, name, hooks in saved:
            module.__dict__[name] = hooks
