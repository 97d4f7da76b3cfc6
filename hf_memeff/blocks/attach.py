"""Attach the engine to a model, take it off again, and report what it does."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_memeff.blocks.arguments import CACHE_NAMES, filled_cache
from hf_memeff.blocks.batch_tokens import enter_decoder, enter_model, leave
from hf_memeff.blocks.block import (
    NEEDS_SCORES,
    BlockForward,
    hand_over,
    say_once,
    strict_message,
    unscored_message,
)
from hf_memeff.blocks.causal_loss import attach_loss, detach_loss, loss_report
from hf_memeff.blocks.layouts import Layout, NormConvention, layout_of, norm_convention, part
from hf_memeff.blocks.linear import LinearPlan, WeightLinear, plan_linear
from hf_memeff.blocks.options import EngineOptions, SalientTokens
from hf_memeff.blocks.selfcheck import check_block, needs_weights
from hf_memeff.blocks.status import MemeffStatus, PathReport
from hf_memeff.blocks.store import make_store

_OPTIONS = "_hf_memeff_options"


def attach_blocks(model: nn.Module, options: EngineOptions) -> None:
    """Put the engine on every decoder block of a model and on its causal loss.

    Calling it again applies new options and looks at the adapters afresh. The model's classes stay as they are; each
    block's instance gets a forward and a forward pre-hook.

    Args:
        model: the model that carries the LoRA layers (inside PEFT: ``peft_model.get_base_model()``).
        options: how blocks and loss run.

    Raises:
        ValueError: a dense layer's index is out of range, or tokens are to be chosen by attention and no block's can be
            scored.
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
        dense = _dense_layers(options, [layer for _, layer in layers])
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
            _look_for_salient_blocks(model, options)
        for parent in _parents(model, [layer for _, layer in layers]):
            if options.salient is not None:
                _read_batches(parent, enter_decoder)
            if "use_cache" in inspect.signature(type(parent).forward).parameters:
                parent.register_forward_pre_hook(build_no_cache, with_kwargs=True)
            parent.register_forward_hook(return_no_cache)
        if options.salient is not None:
            _read_batches(model, enter_model)
        _swap_factors(model, nn.Linear, WeightLinear)
        attach_loss(model, options)
    except BaseException:
        detach_blocks(model)
        raise
    model.__dict__[_OPTIONS] = options


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
    model.__dict__.pop(_OPTIONS, None)


def is_attached(model: nn.Module) -> bool:
    """Whether the engine is on this model."""
    return attached_options(model) is not None


def attached_options(model: nn.Module) -> EngineOptions | None:
    """The options that the engine runs with now, or ``None`` where it is not attached; ``model`` as for
    ``attach_blocks``.
    """
    return model.__dict__.get(_OPTIONS)


def set_token_budget(model: nn.Module, token_budget: float | str) -> None:
    """Change how many tokens the backward pass of salient blocks keeps, from the next call on.

    Args:
        model: as for ``attach_blocks``, attached with salient tokens.
        token_budget: a share in (0, 1] (1 keeps every token and scores none), or ``adaptive``.

    Raises:
        ValueError: the budget is out of its range, or the engine is not attached with salient tokens.
    """
    options = attached_options(model)
    if options is None or options.salient is None:
        raise ValueError(
            "got a model that is not attached with salient tokens, expected one made with SageConfig. "
            "Fix: get_peft_model(model, SageConfig(...)), or attach(model, SageConfig(...))."
        )
    if token_budget != "adaptive":
        number = isinstance(token_budget, int | float) and not isinstance(token_budget, bool)
        if not number or not 0.0 < token_budget <= 1.0:
            raise ValueError(
                f"got token_budget={token_budget!r}, expected a number above 0 and at most 1, or 'adaptive'. "
                "Fix: pass one of these, such as 0.5."
            )
        token_budget = float(token_budget)
    salient = dataclasses.replace(options.salient, token_budget=token_budget)
    options = dataclasses.replace(options, salient=salient)
    model.__dict__[_OPTIONS] = options
    for layer in model.modules():
        forward = _attached_forward(layer)
        if forward is not None and forward.salient is not None:
            forward.salient = salient
    if token_budget != 1.0:
        _look_for_salient_blocks(model, options)


def engine_status(model: nn.Module) -> MemeffStatus:
    """Report path and reason of every block and every adapted linear layer as the next training call would take it."""
    options = attached_options(model)
    if options is None:
        return MemeffStatus(False)
    blocks, linears, inside = [], [], set()
    for name, layer in model.named_modules():
        forward = _attached_forward(layer)
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
        notes.append(_salient_note(model, options.salient))
    return MemeffStatus(
        True, tuple(blocks), tuple(linears), loss_report(model, options), options.activation_store, tuple(notes)
    )


def _salient_note(model: nn.Module, salient: SalientTokens) -> str:
    """What the report says about the tokens that backward passes leave out."""
    found = [(f, layer) for layer in model.modules() if (f := _attached_forward(layer)) is not None]
    sparse = [f for f, layer in found if f.sparse and f.path(layer)[0] == "structured"]
    budget = salient.token_budget if isinstance(salient.token_budget, str) else f"{salient.token_budget:.4g}"
    keys = "all, the attention being re-run whole" if _re_runs_attention(model) else salient.backward_keys
    return (
        f"approximate gradients in {len(sparse)} of {len(found)} blocks: token budget {budget}, saliency "
        f"{salient.saliency}, backward keys {keys}; the other blocks keep every token"
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


def _dense_layers(options: EngineOptions, layers: list[nn.Module]) -> set[int]:
    """Indices of the blocks that keep every token: those of blocks of a known layout, or of all where there is none.

    The blocks of a vision tower before the language model's are not counted.

    Raises:
        ValueError: one is out of range.
    """
    known = [index for index, layer in enumerate(layers) if layout_of(layer) is not None] or list(range(len(layers)))
    count = len(known)
    if options.salient is None or count == 0:
        return set()
    for index in options.salient.dense_layers:
        if not -count <= index < count:
            raise ValueError(
                f"got the dense layer {index}, expected an index from {-count} to {count - 1}: the model has {count} "
                "blocks. Fix: take it out of dense_layers."
            )
    return {known[index] for index in options.salient.dense_layers}


def _look_for_salient_blocks(model: nn.Module, options: EngineOptions) -> None:
    """Refuse a model none of whose blocks has a known layout where attention is to be scored; say it otherwise.

    Raises:
        ValueError: as above.
        RuntimeError: ``strict``, and blocks see other keys in their backward pass than they were told to.
    """
    assert options.salient is not None
    forwards = [f for m in model.modules() if (f := _attached_forward(m)) is not None and f.sparse]
    unknown = [f for f in forwards if f.layout is None or f.refusal or f.verdict]
    if forwards and len(unknown) == len(forwards):
        reason = unknown[0].refusal or unknown[0].verdict or "the layout of its blocks is not known"
        if options.salient.saliency in NEEDS_SCORES:
            raise ValueError(unscored_message(type(model).__name__, options.salient.saliency, reason, exact=True))
        say_once(f"no block of this {type(model).__name__} leaves tokens out, its gradients are exact: {reason}")
    if options.strict and options.salient.backward_keys == "kept" and _re_runs_attention(model):
        raise RuntimeError(
            'got strict=True and backward_keys="kept" on a model whose attention drops out in training, expected one '
            "that does not: such an attention is re-run whole, and its backward pass sees all keys. "
            'Fix: set its attention dropout to 0, or pass backward_keys="all" or strict=False.'
        )


def _re_runs_attention(model: nn.Module) -> bool:
    """Whether salient blocks have to run their attention whole in the backward pass."""
    for layer in model.modules():
        forward = _attached_forward(layer)
        if forward is None or not forward.sparse or forward.layout is None or forward.refusal:
            continue
        attention = part(layer, forward.layout.attention)
        module = getattr(attention, "attn_dropout", None)
        rate = module.p if isinstance(module, nn.Dropout) else getattr(attention, "attention_dropout", 0.0)
        if forward.unscored or (isinstance(rate, float) and rate > 0.0):
            return True
    return False


def _read_batches(module: nn.Module, enter: Callable[..., None]) -> None:
    """Have the calls of a module read what their batch says about its tokens."""
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


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


def _attached_forward(layer: nn.Module) -> BlockForward | None:
    for slot in ("forward", "_old_forward"):
        forward = layer.__dict__.get(slot)
        if isinstance(forward, BlockForward):
            return forward
    return None


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


def _parents(model: nn.Module, layers: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose forward runs the blocks: owners of a list that holds attached blocks."""
    wanted = {id(layer) for layer in layers}
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(id(c) in wanted for c in child):
                yield module
                break


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
