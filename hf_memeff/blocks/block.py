"""The callable that replaces a decoder layer's forward, and the decision which path a call takes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memeff.blocks.arguments import bind, pack, without_cache
from hf_memeff.blocks.attention_probe import UnscorableAttention
from hf_memeff.blocks.batch_tokens import BatchTokens, current_tokens, recall, remember
from hf_memeff.blocks.layouts import Layout, NormConvention, part
from hf_memeff.blocks.linear import LinearPlan, plan_linear
from hf_memeff.blocks.options import SalientTokens
from hf_memeff.blocks.passes import BlockCall
from hf_memeff.blocks.salient import SalientBlock, SalientCall
from hf_memeff.blocks.store import ActivationStore
from hf_memeff.blocks.structured import StructuredBlock
from hf_memeff.blocks.survey import Survey, name_of
from hf_memeff.ops.activations import Activation, identify_activation

logger = logging.getLogger("hf_memeff")

_UNNAMED = "its forward takes arguments without names, of which the hidden states cannot be told apart"
NEEDS_SCORES = ("attention", "value_norm")  # saliencies that look at the attention's own tensors
SELF = "_hf_memeff_self"  # keyword under which the pre-hook hands a layer to its forward


_said: set[str] = set()


def say_once(message: str) -> None:
    """Log a message once per process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


class Holder:
    """Carries a module through keyword arguments; opaque, so that nothing on the way moves or flattens the module."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def hand_over(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: give the module being called (a replica or a copy gives itself) to the forward attached to
    it.
    """
    return args, kwargs | {SELF: Holder(module)}


@dataclass
class BlockForward:
    """An attached layer's forward. It holds settings and findings, never the layer or one of its tensors.

    Attributes:
        index: place among the attached blocks.
        count: number of attached blocks.
        names: positional parameters of the layer's own forward, without ``self``.
        layout: the layer's layout, or ``None`` for an unknown one.
        conventions: convention of each norm of the layout.
        store: where block inputs wait.
        tile_tokens: rows of one tile, or ``None`` for automatic.
        strict: whether a fallback is an error.
        verdict: why the self-check refused the structured block; empty if it passed; ``None`` while it has not run.
        refusal: why the layout cannot be used at all (a property of the layer that does not change); empty if it can.
        salient: how tokens are chosen for the backward pass; ``None`` keeps all (MeSP, and SAGE's dense layers).
        unscored: why tokens cannot be chosen here by a look at the attention; empty if they can; ``None`` while the
            self-check has not run.
        previous: a forward that was already set on the instance (accelerate's hooks do that), which ours takes the
            place of.
    """

    index: int
    count: int
    names: tuple[str, ...]
    layout: Layout | None
    conventions: dict[str, NormConvention]
    store: ActivationStore
    tile_tokens: int | None
    strict: bool
    verdict: str | None = None
    refusal: str = ""
    salient: SalientTokens | None = None
    unscored: str | None = None
    previous: Callable[..., Any] | None = field(default=None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = kwargs.pop(SELF, None)
        if holder is None:
            raise RuntimeError(
                "got a decoder layer's forward without its forward pre-hook, expected both or neither: the hook was "
                "removed, or the forward was taken off the layer. Call the layer itself, and undo hf_memeff with "
                "detach(model)."
            )
        layer = holder.module
        if self.sparse and layer.training:
            self._note(args, kwargs)
        if not (layer.training and torch.is_grad_enabled()):
            return self.original(layer, *args, **kwargs)
        return self.train_call(layer, args, kwargs)

    @property
    def sparse(self) -> bool:
        """Whether the backward pass of a structured call leaves tokens out."""
        return self.salient is not None and self.salient.token_budget != 1.0

    @torch.compiler.disable
    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the batch's tokens for a checkpoint that runs this call again in the backward pass, and refuse an
        adaptive budget where shapes have to be known.
        """
        assert self.salient is not None
        tokens = current_tokens()
        compiled = tokens is not None and tokens.compiled
        rerun = _in_backward()
        if self.salient.token_budget == "adaptive" and (compiled or rerun):
            where = "torch.compile" if compiled else "a checkpoint around the blocks"
            raise ValueError(
                f'got token_budget="adaptive" under {where}, expected a ratio: there the number of kept tokens must be '
                "known before they are. Fix: pass a ratio such as token_budget=0.5."
            )
        bound = bind(self.names, args, kwargs)
        if bound is not None and not rerun:
            remember(bound[0], tokens or BatchTokens())

    def original(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with gradient checkpointing left out: an attached block already is a checkpoint."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return _uncheckpointed(type(layer))(layer, *args, **kwargs)

    @torch.compiler.disable(reason="hf_memeff differentiates blocks by hand, outside of the compiled graph")
    def train_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A training call: structured, recomputed whole, or (where re-running would be wrong) the layer's own graph."""
        bound = bind(self.names, args, kwargs)
        if bound is None:
            if Survey.of(layer).unreplayable(layer, kwargs, None):
                return self.original(layer, *args, **kwargs)
            if self.strict:
                raise RuntimeError(strict_message(type(layer).__name__, _UNNAMED))
            return checkpoint(lambda *a: self.original(layer, *a, **without_cache(kwargs)), *args, use_reentrant=False)
        hidden, others = bound
        path, reason, plans = self.path(layer, others, hidden)
        if path == "off":
            return self.original(layer, *args, **kwargs)
        others = without_cache(others)
        if getattr(layer, "gradient_checkpointing", False):
            say_once(
                "gradient checkpointing is on: attached blocks already keep nothing but their input, so it is "
                "absorbed; training steps build no key-value cache"
            )
        if path == "structured" and self.verdict is None:
            from hf_memeff.blocks.selfcheck import check_block

            self.verdict = check_block(self, layer)
            if self.verdict:
                path, reason = "recompute", self.verdict
        if path == "recompute":
            if self.strict:
                raise RuntimeError(strict_message(type(layer).__name__, reason))
            return self._recompute(layer, hidden, others)
        assert plans is not None
        if not self.sparse:
            return self.structured(layer, hidden, others, plans)
        assert self.salient is not None
        tokens = current_tokens() or (self._tokens_again(layer, hidden) if _in_backward() else BatchTokens())
        if self.unscored is None:
            self.unscored = self.look(layer)
        call = SalientCall(self.salient, tokens, whole=bool(self.unscored))
        for notice in call.notices(hidden.shape[1]):
            say_once(notice)
        return self.structured(layer, hidden, others, plans, call)

    def _tokens_again(self, layer: nn.Module, hidden: Tensor) -> BatchTokens:
        """The batch's tokens, for a block that a checkpoint runs again.

        Raises:
            RuntimeError: it was not called with these hidden states before.
        """
        tokens = recall(hidden)
        if tokens is None:
            raise RuntimeError(
                f"got a {type(layer).__name__} that is run again in the backward pass with other hidden states than "
                "before (a checkpoint around several blocks, or hooks that copy what it saves), expected the same "
                "ones: SAGE has to keep the same tokens again. Fix: take the checkpoint away; attached blocks already "
                "are checkpoints."
            )
        return tokens

    def look(self, layer: nn.Module) -> str:
        """Why tokens cannot be chosen by a look at the layer's attention, or an empty string.

        Raises:
            ValueError: they have to be.
        """
        from hf_memeff.blocks.selfcheck import check_salient

        found = check_salient(self, layer)
        if found and self.salient is not None and self.salient.saliency in NEEDS_SCORES:
            raise ValueError(unscored_message(type(layer).__name__, self.salient.saliency, found))
        return found

    def structured(
        self,
        layer: nn.Module,
        hidden: Tensor,
        others: dict[str, Any],
        plans: dict[str, LinearPlan],
        salient: SalientCall | None = None,
    ) -> Tensor:
        """Run the structured block on the layer; ``salient`` says how its backward pass chooses tokens."""
        assert self.layout is not None
        packed, tensors = pack(_attention_arguments(others))
        adapters = [t for name in self.layout.linears for t in plans[name].tensors()]
        call = BlockCall(
            layer,
            self.layout,
            self.conventions,
            _activation(part(layer, self.layout.mlp), self.layout, layer),
            plans,
            packed,
            self.store,
            self.count - self.index,
            self.tile_tokens or max(256, hidden.shape[:-1].numel() // 4),
        )
        if salient is None:
            return StructuredBlock.apply(hidden, call, len(adapters), *adapters, *tensors)
        try:
            return SalientBlock.apply(hidden, call, salient, len(adapters), *adapters, *tensors)
        except UnscorableAttention as error:
            saliency = salient.settings.saliency
            message = unscored_message(type(layer).__name__, saliency, str(error), exact=saliency == "gradient")
            raise ValueError(message) from error

    def _recompute(self, layer: nn.Module, hidden: Tensor, others: dict[str, Any]) -> Any:
        """Whole-block recompute: PyTorch's non-reentrant checkpoint, with the block's input in the store."""

        def run(h: Tensor) -> Any:
            return self.original(layer, h, **others)

        if self.store.kind == "memory" or not hidden.is_floating_point():
            return checkpoint(run, hidden, use_reentrant=False)
        key = hidden.data_ptr(), hidden.shape

        def keep(t: Tensor) -> tuple[Tensor, torch.device | None]:
            if (t.data_ptr(), t.shape) == key:
                return self.store.put(t.detach(), self.count - self.index), t.device
            return t, None

        def bring_back(saved: tuple[Tensor, torch.device | None]) -> Tensor:
            tensor, device = saved
            return tensor if device is None else self.store.get(tensor, device)

        with torch.autograd.graph.saved_tensors_hooks(keep, bring_back):
            return checkpoint(run, hidden, use_reentrant=False)

    def path(
        self, layer: nn.Module, others: dict[str, Any] | None = None, hidden: Tensor | None = None
    ) -> tuple[str, str, dict[str, LinearPlan] | None]:
        """Which path a training call takes and why.

        Args:
            layer: the attached layer.
            others: arguments of the call, or ``None`` to ask without one (the status report).
            hidden: hidden states of the call, likewise.

        Returns:
            ``structured``, ``recompute`` or ``off``; the reason, empty for ``structured``; the projections' plans for
            ``structured``.
        """
        survey = Survey.of(layer)
        reason = survey.unreplayable(layer, others, hidden)
        if reason:
            return "off", reason, None
        reason = self._unstructured(layer, survey, others)
        if reason:
            return "recompute", reason, None
        assert self.layout is not None
        plans: dict[str, LinearPlan] = {}
        for name in self.layout.linears:
            plan = plan_linear(part(layer, name))
            if isinstance(plan, str):
                return "recompute", f"{name}: {plan}", None
            plans[name] = plan
        known = {factor for plan in plans.values() for term in plan.terms for factor in (term.lora_a, term.lora_b)}
        for module, parameter in survey.trained:
            if module not in known:
                return "recompute", f"{name_of(layer, module)}.{parameter} is trained", None
        return "structured", "", plans

    def _unstructured(self, layer: nn.Module, survey: Survey, others: dict[str, Any] | None) -> str:
        """Why a call cannot run structured whatever its projections are, or an empty string."""
        if not self.names:
            return _UNNAMED
        if self.layout is None:
            return f"the layout of {type(layer).__name__} is not known"
        if self.refusal or self.verdict:
            return self.refusal or self.verdict or ""
        if survey.managed is not None:
            return f"{name_of(layer, survey.managed)} is managed by accelerate's hooks (offloading)"
        for name in self.layout.norms:
            norm = part(layer, name)
            if norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__:
                return f"{name} has hooks or a replaced forward"
        attention = part(layer, self.layout.attention)
        if "forward" in attention.__dict__ or attention._forward_pre_hooks or _foreign_hooks(attention):
            return f"{self.layout.attention} has hooks or a replaced forward"
        if others is not None:
            if others.get("encoder_hidden_states") is not None:
                return "cross-attention is not part of the layout"
            if any(t.requires_grad for t in pack(others)[1]):
                return "another argument than the hidden states wants a gradient"
        return ""


def strict_message(layer: str, reason: str) -> str:
    """The error of ``strict=True``."""
    return (
        f"got a {layer} that cannot run structured ({reason}), expected all blocks structured because strict=True. "
        "Pass strict=False to let it run as whole-block recompute (exact, less saving)."
    )


def _in_backward() -> bool:
    """Whether the autograd engine is running, so that a call is a checkpoint's re-run."""
    task: Any = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def unscored_message(layer: str, saliency: str, reason: str, *, exact: bool = False) -> str:
    """The error of a saliency that has to look at an attention which cannot be looked at; ``exact`` where no saliency
    would leave tokens out.
    """
    fix = "" if exact else 'pass saliency="gradient", which needs no scores, or '
    return (
        f"got saliency={saliency!r} on a {layer} whose attention cannot be scored ({reason}), expected attention that "
        "runs through transformers' attention functions. "
        f"Fix: {fix}train with MespConfig."
    )


def _foreign_hooks(module: nn.Module) -> bool:
    """Forward hooks other than transformers' output capture, which stays installed and idle unless outputs are asked
    for.
    """
    return any("output_capturing_hook" not in getattr(h, "__qualname__", "") for h in module._forward_hooks.values())


def _attention_arguments(others: dict[str, Any]) -> dict[str, Any]:
    """The layer's arguments that it passes on to its attention, the mask too where a caller left it at its default."""
    return {"attention_mask": None} | {k: v for k, v in others.items() if not k.startswith("encoder_")}


_activations = threading.local()


def _activation(mlp: nn.Module, layout: Layout, layer: nn.Module) -> Activation:
    """The activation of a layer, identified once per activation class and thread."""
    function = getattr(mlp, layout.activation.rpartition(".")[2])
    kind = type(function) if isinstance(function, nn.Module) else function
    known: dict[Any, Activation] = _activations.__dict__.setdefault("known", {})
    if kind not in known:
        found = identify_activation(function)
        if found.name == "other":
            return found  # differentiated through this very module, which may have parameters of its own
        known[kind] = found
    return known[kind]


def _uncheckpointed(cls: type[nn.Module]) -> Callable[..., Any]:
    """A layer class's forward without transformers' checkpointing wrapper (transformers >= 5.20 checkpoints inside
    ``forward``).

    Older releases checkpoint in ``__call__``: there a block is checkpointed twice, which is exact and costs one more
    forward.
    """
    forward: Any = cls.forward
    while getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward
