"""Attach the engine to a model, take it off again, and report what it does."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_memeff.blocks.arguments import CACHE_NAMES, filled_cache
from hf_memeff.blocks.attach_salient import dense_layers, look_for_salient_blocks, read_batches, salient_note
from hf_memeff.blocks.attached import OPTIONS, attached_forward, attached_options, owners
from hf_memeff.blocks.batch_tokens import enter_decoder, enter_model, leave
from hf_memeff.blocks.block import BlockForward, hand_over, strict_message
from hf_memeff.blocks.causal_loss import attach_loss, detach_loss, loss_report
from hf_memeff.blocks.layouts import Layout, NormConvention, layout_of, norm_convention, part
from hf_memeff.blocks.linear import LinearPlan, WeightLinear, plan_linear
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.blocks.selfcheck import check_block, needs_weights
from hf_memeff.blocks.status import MemeffStatus, PathReport
from hf_memeff.blocks.store import make_store


def attach_blocks(model: nn.Module, options: EngineOptions) -> None:
    """Put the engine on every decoder block of a model and on its causal loss.

    Calling it again applies new options and looks at the adapters afresh. The model's classes stay as they are; each
    block's instance gets a forward and a forward pre-hook.

    Args:
        model: the model that carries the LoRA layers (inside PEFT: ``peft_model.get_base_model()``).
        options: how blocks and loss run.

    Raises:
        ValueError: a dense layer's index is out of range, or tokens are to be left out by a score that the model does
            not give: no block's attention can be scored, or it cannot be read early.
        RuntimeError: ``strict`` and a block cannot run structured, or ``tiled_loss="always"`` on a model without a
            causal LM head.
        ActivationStoreError: the store's folder cannot be used.
    """
    detach_blocks(model)
    layers = list(_decoder_layers(model))
    store = make_store(options.activation_store, options.activation_store_dir, max(1, len(layers)))
    verdicts: dict[Any, str] = {}
    unscored: dict[Any, str] = {}
    try:
        dense = dense_layers(options, [layer for _, layer in layers])
        for index, (name, layer) in enumerate(layers):
            forward = _make_forward(layer, index, len(layers), store, options)
            forward.salient = None if index in dense else options.salient
            _set_forward(layer, forward)
            if forward.layout is not None and not forward.refusal and not needs_weights(layer):
                key = _distinct(layer, forward)
                if key not in verdicts:
                    verdicts[key] = _checked(forward, layer)
                forward.verdict = verdicts[key] if forward.path(layer)[0] == "structured" else None
                if forward.sparse and forward.path(layer)[0] == "structured":
                    if key not in unscored:
                        unscored[key] = forward.look(layer)
                    forward.unscored = unscored[key]
            if options.strict:
                path, reason, _ = forward.path(layer)
                if path != "structured":
                    raise RuntimeError(strict_message(name, reason))
        if options.strict and not layers:
            raise RuntimeError(strict_message(type(model).__name__, "no decoder block was found in it"))
        if options.salient is not None and options.salient.token_budget != 1.0:
            look_for_salient_blocks(model, options)
        for parent in owners(model, [layer for _, layer in layers]):
            if options.salient is not None:
                read_batches(parent, enter_decoder)
            if "use_cache" in inspect.signature(type(parent).forward).parameters:
                parent.register_forward_pre_hook(build_no_cache, with_kwargs=True)
            parent.register_forward_hook(return_no_cache)
        if options.salient is not None:
            read_batches(model, enter_model)
        _swap_factors(model, nn.Linear, WeightLinear)
        attach_loss(model, options)
    except BaseException:
        detach_blocks(model)
        raise
    model.__dict__[OPTIONS] = options


def detach_blocks(model: nn.Module) -> None:
    """Take the engine off: every forward, hook and class is what it was before ``attach_blocks``. Nothing happens
    where it is not attached.
    """
    for module in model.modules():
        for slot in ("forward", "_old_forward"):
            forward = module.__dict__.get(slot)
            if isinstance(forward, BlockForward):
                if forward.previous is not None:
                    module.__dict__[slot] = forward.previous
                elif slot == "_old_forward":  # accelerate's hooks came after ours and took it for the layer's own
                    module.__dict__[slot] = type(module).forward.__get__(module)
                else:
                    del module.__dict__[slot]
        _remove_hooks(module)
    _swap_factors(model, WeightLinear, nn.Linear)
    detach_loss(model)
    model.__dict__.pop(OPTIONS, None)


def is_attached(model: nn.Module) -> bool:
    """Whether the engine is on this model."""
    return attached_options(model) is not None


def engine_status(model: nn.Module) -> MemeffStatus:
    """Report path and reason of every block and every adapted linear layer as the next training call would take it."""
    options = attached_options(model)
    if options is None:
        return MemeffStatus(False)
    blocks, linears, inside = [], [], set()
    for name, layer in model.named_modules():
        forward = attached_forward(layer)
        if forward is None:
            continue
        path, reason, plans = forward.path(layer)
        if path == "structured" and forward.verdict is None:
            reason = "the self-check waits for the first forward"
        blocks.append(PathReport(name, path, reason))
        for child, module in layer.named_modules():
            if hasattr(module, "lora_A"):
                inside.add(module)
                plan = plans.get(child) if plans else None
                linears.append(_linear_report(f"{name}.{child}", module, path, plan))
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and module not in inside:
            linears.append(_linear_report(name, module, "outside", None))
    notes = ["no decoder block was found: adapters outside blocks run alone"] if not blocks else []
    if options.salient is not None:
        notes.append(salient_note(model, options.salient))
    return MemeffStatus(
        True, tuple(blocks), tuple(linears), loss_report(model, options), options.activation_store, tuple(notes)
    )


def _linear_report(name: str, module: nn.Module, path: str, plan: LinearPlan | None) -> PathReport:
    if path == "structured":
        if plan is None:
            return PathReport(name, "peft", "it is not part of the block's layout")
        return PathReport(name, "structured", plan.reason)
    found = plan_linear(module)
    if isinstance(found, str):
        return PathReport(name, "peft", found)
    lean = bool(getattr(module, "saves_input_only", False))
    return PathReport(
        name, "lean" if lean else "peft", "outside a structured block" if path == "outside" else f"its block: {path}"
    )


def _decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that transformers itself would checkpoint: they are the blocks. Nested ones belong to the outer block."""
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in taken):
            continue
        known = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)
        if name and (known or layout_of(module) is not None):
            taken.append(name + ".")
            yield name, module


def _make_forward(layer: nn.Module, index: int, count: int, store: Any, options: EngineOptions) -> BlockForward:
    layout = layout_of(layer)
    conventions: dict[str, NormConvention] = {}
    refusal = ""
    if layout is not None:
        refusal = _missing_parts(layer, layout)
        if not refusal:
            for name in layout.norms:
                found = norm_convention(part(layer, name))
                if found is None:
                    refusal = f"{name} ({type(part(layer, name)).__name__}) is not a norm with a hand-derived gradient"
                    break
                conventions[name] = found
    names = tuple(
        p.name
        for p in inspect.signature(type(layer).forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )[1:]
    return BlockForward(
        index, count, names, layout, conventions, store, options.mlp_tile_tokens, options.strict, refusal=refusal
    )


def _missing_parts(layer: nn.Module, layout: Layout) -> str:
    for name in (*layout.linears, *layout.norms, *layout.dropouts):
        try:
            part(layer, name)
        except AttributeError:
            return f"the {layout.name} layout names {name}, which this layer does not have"
    return ""


def _set_forward(layer: nn.Module, forward: BlockForward) -> None:
    # accelerate's hooks call the instance's `_old_forward`; taking its place keeps their device handling around the
    # block
    slot = "_old_forward" if hasattr(layer, "_hf_hook") else "forward"
    forward.previous = layer.__dict__.get(slot)
    layer.__dict__[slot] = forward
    layer.register_forward_pre_hook(hand_over, with_kwargs=True)


def _checked(forward: BlockForward, layer: nn.Module) -> str:
    """Run the self-check on a layer whose adapters may all be inactive or absent at this moment."""
    if forward.path(layer)[0] != "structured":
        return ""
    return check_block(forward, layer)


def _distinct(layer: nn.Module, forward: BlockForward) -> tuple[Any, ...]:
    """What makes two layers the same for the self-check: class, parameters' shapes, dtypes and devices, and every
    plain setting of the attention.
    """
    assert forward.layout is not None
    attention = part(layer, forward.layout.attention)
    plain = {
        k: v
        for k, v in attention.__dict__.items()
        if isinstance(v, int | float | str | bool | None) and k != "layer_idx"
    }
    kinds = tuple((n, type(m).__name__) for n, m in layer.named_modules())
    weights = tuple((n, tuple(p.shape), p.dtype, p.device, p.requires_grad) for n, p in layer.named_parameters())
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    return type(layer), kinds, weights, tuple(sorted(plain.items(), key=str)), implementation


def build_no_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the decoder: under gradient checkpointing ask for no key-value cache.

    transformers would turn it off itself, with a warning of its own about what the engine absorbs.
    """
    checkpointed = getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled()
    if not checkpointed or any(kwargs.get(name) is not None for name in CACHE_NAMES):
        return None
    return args, kwargs | {"use_cache": False}


def return_no_cache(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the decoder: a training step returns no key-value cache, since its blocks put nothing into it.

    The cache object itself is left to the model: transformers reads its presence when it decides whether restarting
    positions are packed samples, and a step must be masked as it would be without the engine.
    """
    if not (module.training and torch.is_grad_enabled()) or not dataclasses.is_dataclass(output):
        return None
    values = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    empty = [n for n in CACHE_NAMES if values.get(n) is not None and not filled_cache({n: values[n]})]
    kind: Any = type(output)
    return kind(**values | dict.fromkeys(empty)) if empty else None


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (hand_over, build_no_cache, enter_decoder, enter_model):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, after in list(module._forward_hooks.items()):
        if after in (return_no_cache, leave):
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _swap_factors(model: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Give plain adapter factors the class that hands its weight out through a call (or take it away again)."""
    for module in model.modules():
        for factors in (getattr(module, "lora_A", None), getattr(module, "lora_B", None)):
            for factor in factors.values() if isinstance(factors, nn.ModuleDict) else ():
                if type(factor) is old:
                    factor.__class__ = new
