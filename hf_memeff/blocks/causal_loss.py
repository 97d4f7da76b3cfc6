"""The tiled loss of a causal LM: a training call with labels never builds whole logits.

The model's own forward runs as it is, so that argument handling, auxiliary losses and outputs stay its own. For the
duration of one call its head computes the tiled loss instead of logits, and its loss function hands that loss on. Which
logits the model would have made (scale, softcap) is read from its config and proven on random hidden states before it
is used.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memeff.blocks.block import SELF, Holder, say_once
from hf_memeff.blocks.head_rule import HeadRule, check_rule, head_rule
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.blocks.status import PathReport
from hf_memeff.blocks.tiled_output import without_logits
from hf_memeff.ops.linear_cross_entropy import linear_cross_entropy

_REASON = "hf_memeff runs blocks and loss by hand, outside of the compiled graph"


@dataclass
class LossForward:
    """A causal LM's forward that computes the loss of a training step in tiles.

    Attributes:
        mode: ``auto``, ``always`` or ``never``, as ``EngineOptions.tiled_loss``.
        tile_bytes: bytes of float32 logits in one tile, or ``None`` for automatic.
        rule: what the model does to its head's output.
        verdict: why the check on random hidden states refused tiling; empty if it passed; ``None`` while it has not
            run.
        previous: a forward that was already set on the instance.
        owner: the model, for callers that took this forward off it (TRL's fused head keeps a reference to it); dropped
            by copies.
    """

    mode: str
    tile_bytes: int | None
    rule: HeadRule
    verdict: str | None = None
    previous: Callable[..., Any] | None = field(default=None, repr=False)
    owner: weakref.ref[nn.Module] | None = field(default=None, repr=False)
    active: bool = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"owner": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> LossForward:
        copied = LossForward(self.mode, self.tile_bytes, self.rule, self.verdict, self.previous, None, self.active)
        copied.__dict__ |= {k: v for k, v in self.__dict__.items() if k not in copied.__dict__}
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = kwargs.pop(SELF, None)
        model = holder.module if holder is not None else (self.owner() if self.owner is not None else None)
        if model is None:
            raise RuntimeError(
                "got a model's forward without its forward pre-hook, expected both or neither. "
                "Call the model itself, and undo hf_memeff with detach(model)."
            )
        own = self.previous if self.previous is not None else type(model).forward.__get__(model)
        if not self.active or self.mode == "never" or (self.mode == "auto" and not model.training):
            return own(*args, **kwargs)
        arguments = _by_name(own, args, kwargs)
        if arguments.get("labels") is None:
            return own(*args, **kwargs)
        if _whole_logits(model, self, arguments):
            return own(*args, **kwargs)
        return _tiled_call(model, self, own, args, kwargs)


@torch.compiler.disable(reason=_REASON)
def _whole_logits(model: nn.Module, forward: LossForward, arguments: dict[str, Any]) -> bool:
    """Whether a call has to build its logits, which is said once."""
    # outside of the compiled graph: there a module's ``__dict__`` looks as if it held a forward of its own
    reason = untileable(model, forward) or _asks_for_logits(model, arguments)
    if reason:
        say_once(f"the loss is computed from whole logits: {reason}")
    return bool(reason)


def _by_name(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``own`` by name, defaults left out."""
    if not args:
        return kwargs
    return inspect.signature(own).bind_partial(*args).arguments | kwargs


def _asks_for_logits(model: Any, arguments: dict[str, Any]) -> str:
    """Why a call that is given ``arguments`` (by name) wants logits beside its loss, or an empty string."""
    keep = arguments.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        return "logits_to_keep is asked for"
    as_output = arguments.get("return_dict")
    if as_output is None:
        as_output = getattr(model.config, "return_dict", True)
    if not as_output:
        return "return_dict=False asks for a tuple, which has the logits at a place of their own"
    return ""


@torch.compiler.disable(reason=_REASON)
def _tiled_call(
    model: nn.Module, forward: LossForward, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the model's own forward with a head that keeps the hidden states, and a loss that takes them in tiles."""
    head: nn.Module = model.get_output_embeddings()
    kept: dict[str, Tensor] = {}

    def keep_hidden(hidden: Tensor) -> Tensor:
        kept["hidden"] = hidden
        # stands in for the logits in the model's own post-processing; a single column, so that it costs nothing
        return hidden[..., :1]

    def tiled_loss(logits: Any = None, labels: Any = None, vocab_size: Any = None, **loss_kwargs: Any) -> Tensor:
        return _causal_lm_loss(kept["hidden"], head, labels, forward, **loss_kwargs)

    own_loss = model.__dict__.get("_loss_function", _MISSING)
    head.__dict__["forward"] = keep_hidden
    model.__dict__["_loss_function"] = tiled_loss
    try:
        output = own(*args, **kwargs)
    finally:
        del head.__dict__["forward"]
        if own_loss is _MISSING:
            del model.__dict__["_loss_function"]
        else:
            model.__dict__["_loss_function"] = own_loss
    return without_logits(output)


def _causal_lm_loss(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    forward: LossForward,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ``ForCausalLMLoss`` on hidden states: same shift, same reduction."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(hidden.device)
    weight: Tensor = head.weight
    if num_items_in_batch is None:
        count: Tensor | int = (shift_labels != ignore_index).sum()
    else:
        count = num_items_in_batch.to(hidden.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    if hidden.dtype == torch.float64:
        return _float64_loss(hidden, head, shift_labels, forward.rule, ignore_index, count)
    total = linear_cross_entropy(
        hidden,
        weight,
        shift_labels.reshape(hidden.shape[:-1]),
        bias=head.bias,
        ignore_index=ignore_index,
        softcap=forward.rule.softcap,
        scale=forward.rule.scale,
        tile_bytes=forward.tile_bytes or automatic_tile_bytes(hidden),
    )
    return total / count


def _float64_loss(
    hidden: Tensor, head: Any, labels: Tensor, rule: HeadRule, ignore_index: int, count: Tensor | int
) -> Tensor:
    """The loss of float64 hidden states, in checkpointed tiles of 64 rows.

    transformers rounds float64 logits to float32 before its loss. Doing the same operations in the same order keeps a
    float64 comparison with stock LoRA, whose point is exactness, free of rounding noise; speed does not matter there.
    """

    def tile_loss(h: Tensor, tile_labels: Tensor) -> Tensor:
        logits = rule.logits(nn.functional.linear(h, head.weight, head.bias))
        return (
            nn.functional.cross_entropy(logits.float(), tile_labels, ignore_index=ignore_index, reduction="sum") / count
        )

    flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    parts = [
        checkpoint(tile_loss, h, tile_labels, use_reentrant=False)
        for h, tile_labels in zip(flat.split(64), flat_labels.split(64), strict=True)
    ]
    return torch.stack(parts).sum(0)


def automatic_tile_bytes(hidden: Tensor) -> int:
    """Bytes of float32 logits in one tile where the user names none: 4 block inputs, at least 1 MiB.

    Four inputs are what a block's own backward pass holds beside them, so that the loss does not raise a step's peak.

    Args:
        hidden: (..., D), the last hidden states.
    """
    return max(2**20, 4 * hidden.numel() * hidden.element_size())


def untileable(model: nn.Module, forward: LossForward) -> str:
    """Why the loss of a training call cannot be tiled, or an empty string."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__} (adapted, trained or replaced)"
    if any(p.requires_grad for p in head.parameters()):
        return "the head is trained"
    if "forward" in head.__dict__ or hasattr(head, "_hf_hook"):
        return "the head's forward is replaced (offloading hooks)"
    if head._forward_hooks or head._forward_pre_hooks:
        return "the head has forward hooks, which expect logits"
    weight = head.weight
    if weight.is_meta or type(weight.data) is not Tensor or hasattr(weight, "ds_id"):
        return "the head's weight is sharded or not loaded"
    if not weight.is_floating_point():
        return f"the head's weight is {weight.dtype}"
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        return "the model has a loss function of its own, which reads logits"
    if forward.verdict is None:
        forward.verdict = check_rule(model, forward.rule)
    return forward.verdict


_MISSING = object()


def hand_over_to_loss(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a causal LM: give the model being called to the attached forward.

    Not where something was put on top of that forward, which would not know the argument.
    """
    if isinstance(module.__dict__.get("forward"), LossForward):
        return args, kwargs | {SELF: Holder(module)}
    return None


def attach_loss(model: nn.Module, options: EngineOptions) -> None:
    """Put the tiled loss on a causal LM.

    Raises:
        ValueError: ``tiled_loss="always"`` on a model without a causal LM head.
    """
    if options.tiled_loss == "never":
        return
    if not _is_causal_lm(model):
        if options.tiled_loss == "always":
            raise ValueError(
                f'got tiled_loss="always" on {type(model).__name__}, expected a causal language model. '
                'Use tiled_loss="auto", which is off for this model.'
            )
        return
    forward = LossForward(
        options.tiled_loss, options.loss_tile_bytes, head_rule(model.config), previous=model.__dict__.get("forward")
    )
    forward.owner = weakref.ref(model)
    # Trainer and generate() read the arguments a model takes from its forward's signature
    forward.__dict__["__signature__"] = inspect.signature(model.forward)
    forward.__dict__["__wrapped__"] = type(model).forward
    forward.__dict__["__name__"] = "forward"
    model.__dict__["forward"] = forward
    model.register_forward_pre_hook(hand_over_to_loss, with_kwargs=True)


def detach_loss(model: nn.Module) -> None:
    """Take the tiled loss off. A forward that was put on top of it stays, and finds the model's own below."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, LossForward):
        forward.active = False
        if forward.previous is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = forward.previous
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is hand_over_to_loss:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def loss_report(model: nn.Module, options: EngineOptions) -> PathReport:
    """How a training call with labels computes its loss."""
    if options.tiled_loss == "never":
        return PathReport("loss", "logits", 'tiled_loss="never"')
    forward = model.__dict__.get("forward")
    if not _is_causal_lm(model):
        return PathReport("loss", "logits", "not a causal language model")
    if not isinstance(forward, LossForward):
        return PathReport("loss", "logits", "the model's forward was replaced (a trainer's own fused loss)")
    reason = untileable(model, forward) or _asks_for_logits(model, {})
    return PathReport("loss", "logits" if reason else "tiled", reason)


def _is_causal_lm(model: nn.Module) -> bool:
    """A model with output embeddings and transformers' causal loss."""
    getter = getattr(model, "get_output_embeddings", None)
    if getter is None or getter() is None:
        return False
    kind = getattr(model, "loss_type", None) or type(model).__name__
    return "ForCausalLM" in str(kind) or type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
