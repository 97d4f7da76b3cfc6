"""What attaching does for salient tokens: dense layers, what the batch says, the budget, the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from hf_memeff.blocks.attached import OPTIONS, attached_forward, attached_options
from hf_memeff.blocks.batch_tokens import leave
from hf_memeff.blocks.block import NEEDS_SCORES, say_once, unscored_message
from hf_memeff.blocks.layouts import layout_of, part
from hf_memeff.blocks.options import EngineOptions, SalientTokens


def set_token_budget(model: nn.Module, token_budget: float | str) -> None:
    """Change how many tokens the backward pass of salient blocks keeps, from the next call on.

    Args:
        model: as for ``attach_blocks``, attached with salient tokens.
        token_budget: a share in (0, 1] (1 keeps every token and scores none), or ``adaptive``.

    Raises:
        ValueError: the budget is out of its range, the engine is not attached with salient tokens, or the model does
            not give the scores by which tokens are to be left out. The budget stays what it was.
        RuntimeError: ``strict``, and blocks see other keys in their backward pass than they were told to; likewise.
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
    _set_salient(model, dataclasses.replace(options, salient=salient))
    if token_budget != 1.0:
        try:
            look_for_salient_blocks(model, dataclasses.replace(options, salient=salient))
        except BaseException:
            _set_salient(model, options)
            raise


def _set_salient(model: nn.Module, options: EngineOptions) -> None:
    """Have the model and its blocks go by other settings of salient tokens; dense blocks stay dense."""
    model.__dict__[OPTIONS] = options
    for layer in model.modules():
        forward = attached_forward(layer)
        if forward is not None and forward.salient is not None:
            forward.salient = options.salient


def dense_layers(options: EngineOptions, layers: list[nn.Module]) -> set[int]:
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


def look_for_salient_blocks(model: nn.Module, options: EngineOptions) -> None:
    """Refuse a model none of whose blocks has a known layout where attention is to be looked at. Say it where blocks
    without a known layout keep every token.

    Raises:
        ValueError: as above.
        RuntimeError: ``strict``, and blocks see other keys in their backward pass than they were told to.
    """
    assert options.salient is not None
    forwards = [f for m in model.modules() if (f := attached_forward(m)) is not None and f.sparse]
    unknown = [f for f in forwards if f.layout is None or f.refusal or f.verdict]
    if forwards and len(unknown) == len(forwards):
        reason = unknown[0].refusal or unknown[0].verdict or "the layout of its blocks is not known"
        if options.salient.saliency in NEEDS_SCORES:
            raise ValueError(unscored_message(type(model).__name__, options.salient.saliency, reason, exact=True))
        say_once(f"no block of this {type(model).__name__} leaves tokens out, its gradients are exact: {reason}")
    if options.strict and options.salient.backward_keys == "kept" and re_runs_attention(model):
        raise RuntimeError(
            'got strict=True and backward_keys="kept" on a model whose attention drops out in training, expected one '
            "that does not: such an attention is re-run whole, and its backward pass sees all keys. "
            'Fix: set its attention dropout to 0, or pass backward_keys="all" or strict=False.'
        )


def re_runs_attention(model: nn.Module) -> bool:
    """Whether salient blocks have to run their attention whole in the backward pass."""
    for layer in model.modules():
        forward = attached_forward(layer)
        if forward is None or not forward.sparse or forward.layout is None or forward.refusal:
            continue
        attention = part(layer, forward.layout.attention)
        module = getattr(attention, "attn_dropout", None)
        rate = module.p if isinstance(module, nn.Dropout) else getattr(attention, "attention_dropout", 0.0)
        if forward.unscored or (isinstance(rate, float) and rate > 0.0):
            return True
    return False


def salient_note(model: nn.Module, salient: SalientTokens) -> str:
    """What the report says about the tokens that backward passes leave out."""
    found = [(f, layer) for layer in model.modules() if (f := attached_forward(layer)) is not None]
    sparse = [f for f, layer in found if f.sparse and f.path(layer)[0] == "structured"]
    budget = salient.token_budget if isinstance(salient.token_budget, str) else f"{salient.token_budget:.4g}"
    keys = "all, the attention being re-run whole" if re_runs_attention(model) else salient.backward_keys
    return (
        f"approximate gradients in {len(sparse)} of {len(found)} blocks: token budget {budget}, saliency "
        f"{salient.saliency}, backward keys {keys}; the other blocks keep every token"
    )


def read_batches(module: nn.Module, enter: Callable[..., None]) -> None:
    """Have the calls of a module read what their batch says about its tokens."""
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
