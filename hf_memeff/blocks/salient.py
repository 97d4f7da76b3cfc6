"""The salient block: a dense forward, and a backward through the kept tokens alone (SAGE, ACL 2025).

With h' = h + f(h), kept tokens T and incoming gradient g, the gradient of h is g + J^T g[T], J being the Jacobian of
rows T of f with respect to rows T of h; keys and values of other tokens are constants, and with
``backward_keys="kept"`` so are the logits towards them. Adapter gradients sum over rows T. The gradient of a token
outside T is the incoming one, untouched.

Where tokens are chosen in the forward pass, nothing else is kept of it: h[T], the attention's output and log-sum-exp at
T (and, for ``backward_keys="all"``, keys and values). Where they are chosen by the gradient, the block's input is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from hf_memeff.blocks.attention_probe import AttentionProbe, Handler, UnscorableAttention, implementation, score_rule
from hf_memeff.blocks.batch_tokens import BatchTokens
from hf_memeff.blocks.layouts import part
from hf_memeff.blocks.options import SalientTokens
from hf_memeff.blocks.passes import BlockCall, Pass
from hf_memeff.blocks.structured import attend, block_backward, block_forward, project, replayed
from hf_memeff.ops.attention import KeptAttention, rows_attention, rows_log_sum_exp
from hf_memeff.ops.dropout import save_rng
from hf_memeff.ops.precision import autocast_dtype
from hf_memeff.ops.saliency import attention_saliency, gradient_saliency, value_norm_saliency
from hf_memeff.ops.selection import KeptTokens, adaptive_tokens, budget_tokens, select


@dataclass(frozen=True)
class SalientCall:
    """How one call of a salient block chooses its tokens.

    Attributes:
        settings: saliency, budget and what the backward pass sees.
        tokens: what the batch says about its tokens.
        whole: re-run the attention on all rows in the backward pass, through the layer's own code: for an attention
            that cannot be looked at. The backward pass then sees kept queries and all keys.
    """

    settings: SalientTokens
    tokens: BatchTokens
    whole: bool = False

    def notices(self, length: int) -> list[str]:
        """What a user should know about a call whose tokens, of that number, are not scored as asked for."""
        settings, tokens, found = self.settings, self.tokens, []
        by_labels = settings.saliency == "attention" and settings.query_rows != "last"
        if tokens.predicted is None and by_labels:
            found.append(
                "the model sees no labels of tokens, so that SAGE scores the attention of each sequence's last token "
                "alone: right for a classifier of sequences. Where a trainer keeps the labels to itself (label "
                'smoothing, compute_loss_func), saliency="gradient" needs none'
            )
        if settings.token_budget == "adaptive" and settings.min_tokens > length:
            # no length in it: it is said once, not once for each length
            found.append(f"min_tokens={settings.min_tokens} is above a batch's length and stands for all its tokens")
        return found

    def choose(self, scores: Tensor | None, shape: tuple[int, int], device: torch.device) -> KeptTokens:
        """Keep the most salient tokens of (B, S); ``scores`` (B, S) is ``None`` for a random choice."""
        settings, tokens = self.settings, self.tokens
        always = tokens.always(shape, device, settings.sink_tokens, settings.keep_last)
        if scores is None:
            assert not isinstance(settings.token_budget, str)
            return tokens.random(shape, device, always, budget_tokens(settings.token_budget, shape[1]))
        if isinstance(settings.token_budget, str):
            count = adaptive_tokens(scores, tokens.real_on(device), settings.attention_mass, settings.min_tokens)
        else:
            count = budget_tokens(settings.token_budget, shape[1])
        return select(scores, tokens.real_on(device), always, count)


@dataclass
class _Cache:
    """What a salient block keeps for its backward pass; the names tell which of the tensors are there.

    Attributes:
        hidden: the block's input, (B, S, D), or at the kept tokens, (B, K, D).
        positions: (B, K), ``None`` where the gradient chooses.
        alive: (B, K) or ``None``.
        output: (B, K, H, dv), the attention's output at the kept tokens.
        lse: (B, H, K).
        keys: (B, Hkv, S, dh), for ``backward_keys="all"``.
        values: (B, Hkv, S, dv), likewise.
    """

    hidden: Tensor
    positions: Tensor | None = None
    alive: Tensor | None = None
    output: Tensor | None = None
    lse: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        return list(self.__dict__.values())


_ADAPTIVE_ASKED = 0.25  # share of the rows whose attention the gradient is followed through, where no budget says it
_STORED = ("hidden", "output", "keys", "values")  # as large as tokens times width: these wait in the activation store
_FIELDS = tuple(_Cache.__dataclass_fields__)


class _Chooser(AttentionProbe):
    """Chooses the tokens while the attention's tensors are at hand, and keeps what the backward pass needs of them."""

    def __init__(self, call: BlockCall, salient: SalientCall) -> None:
        super().__init__(part(call.layer, call.layout.attention), salient.tokens)
        self._salient = salient
        self.kept: KeptTokens
        self.cache: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        found = super().__call__(module, *args, **kwargs)
        settings, tokens, q = self._salient.settings, self._salient.tokens, self.q
        shape = (q.shape[0], q.shape[2])
        self.kept = kept = self._salient.choose(self._scores(settings, tokens, shape), shape, q.device)
        if self.dropout == 0.0:
            rows = kept.positions
            index = rows[:, None].expand(-1, q.shape[1], -1)
            if self.lse is not None:
                lse = self.lse.gather(2, index)
            else:
                at_rows = q.gather(2, index[..., None].expand(-1, -1, -1, q.shape[-1]))
                lse = rows_log_sum_exp(at_rows, self.k, self.rule, rows)
            self.cache = {"output": kept.take(self.output), "lse": _blank_lse(lse, kept)}
            if settings.backward_keys == "all":
                self.cache |= {"keys": _own_storage(self.k), "values": _own_storage(self.v)}
        self.forget()
        return found

    def _scores(self, settings: SalientTokens, tokens: BatchTokens, shape: tuple[int, int]) -> Tensor | None:
        if settings.saliency == "random":
            return None
        if settings.saliency == "value_norm":
            return value_norm_saliency(self.v)
        rows, alive = tokens.queries(shape, self.q.device, settings.query_rows)
        return attention_saliency(self.q, self.k, self.rule, rows, alive, self.lse)


class _Reader(AttentionProbe):
    """Runs the attention where the gradient will choose, and has it compared with its mask as it is read here: the
    backward pass goes by that.
    """

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        found = super().__call__(module, *args, **kwargs)
        self.forget()
        return found


class SalientBlock(torch.autograd.Function):
    """One decoder block. Inputs: the hidden states, a ``BlockCall``, a ``SalientCall``, the adapter tensors (A, Bm per
    adapter), the tensors among the layer's other arguments.

    Saved for backward: for |T| kept tokens about 2 |T| D elements (the block's input and the attention's output) and H
    |T| float32 numbers, or the whole input where the gradient chooses or the attention drops out; positions; references
    to the adapter tensors and the arguments' tensors; generator state. Number and shapes depend on shapes and
    configuration alone, but for an adaptive budget.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, call: BlockCall, salient: SalientCall, adapter_count: int, *tensors: Tensor
    ) -> Tensor:
        states = save_rng(hidden.device)
        ctx.call, ctx.salient, ctx.adapter_count, ctx.state_count = call, salient, adapter_count, len(states)
        ctx.autocast, ctx.shape = autocast_dtype(hidden.device.type), hidden.shape
        adapters, others = tensors[:adapter_count], tensors[adapter_count:]
        pass_ = Pass(call, hidden, hidden.shape[:-1].numel(), adapters, None)
        saliency = salient.settings.saliency
        probe: AttentionProbe | None = None
        if not salient.whole:
            by_gradient = saliency == "gradient"
            attention = part(call.layer, call.layout.attention)
            probe = _Reader(attention, salient.tokens) if by_gradient else _Chooser(call, salient)
        output = block_forward(pass_, hidden, call.arguments.unpack(others), probe)
        if probe is not None and not probe.called:
            raise UnscorableAttention(f"{call.layout.attention} does not call the attention function it is set to")
        if isinstance(probe, _Chooser):
            kept = probe.kept
            cache = _Cache(kept.take(hidden) if probe.cache else hidden, kept.positions, kept.alive, **probe.cache)
        elif saliency == "random":
            kept = salient.choose(None, (hidden.shape[0], hidden.shape[1]), hidden.device)
            cache = _Cache(hidden, kept.positions, kept.alive)
        else:
            cache = _Cache(hidden)
        for name in _STORED:
            tensor = getattr(cache, name)
            if tensor is not None:
                setattr(cache, name, call.store.put(tensor, call.remaining))
        ctx.save_for_backward(*cache.tensors(), *states, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call: BlockCall = ctx.call
        saved_tensors = ctx.saved_tensors  # unpacking a second time would run a checkpoint around the block again
        cache, rest = _Cache(*saved_tensors[: len(_FIELDS)]), saved_tensors[len(_FIELDS) :]
        states, tensors = rest[: ctx.state_count], rest[ctx.state_count :]
        adapters, others = tensors[: ctx.adapter_count], tensors[ctx.adapter_count :]
        needs_input, _, _, _, *needs = ctx.needs_input_grad
        for name in _STORED:
            saved = getattr(cache, name)
            if saved is not None:
                setattr(cache, name, call.store.get(saved, g.device))
        kwargs = call.arguments.unpack(others)
        count = ctx.shape[:-1].numel()
        with replayed(list(states), g.device, ctx.autocast):
            pass_ = Pass(call, cache.hidden, count, adapters, needs[: ctx.adapter_count])
            dh = _salient_backward(pass_, g, cache, ctx.salient, kwargs, need_input=needs_input)
        return dh, None, None, None, *pass_.gradients(adapters), *[None] * len(others)


def _salient_backward(
    pass_: Pass, g: Tensor, cache: _Cache, salient: SalientCall, kwargs: dict[str, Any], *, need_input: bool
) -> Tensor | None:
    """The block's backward through its kept tokens: the gradient of its input, (B, S, D), or ``None``."""
    batch, length = g.shape[:2]
    found = _recompute(pass_, cache.hidden, salient, kwargs) if cache.output is None and not salient.whole else None
    if cache.positions is None:
        kept = salient.choose(_gradient_scores(g, found, salient), (batch, length), g.device)
    else:
        kept = KeptTokens(cache.positions, cache.alive)
    index = (kept.positions + length * torch.arange(batch, device=g.device)[:, None]).flatten()
    projected = None
    if cache.output is None:
        if found is not None:
            projected = found.fill(cache, salient, kept)
        else:
            alive = index if kept.alive is None else index[kept.alive.flatten()]
            return block_backward(pass_, g, cache.hidden, kwargs, need_input=need_input, kept=alive)
    columns = kept.positions[..., None].expand(-1, -1, g.shape[-1])
    g_kept = g.gather(1, columns)
    total = block_backward(
        pass_,
        kept.blank(g_kept.clone()),
        cache.hidden,
        _arguments_at(kwargs, kept.positions, length),
        need_input=need_input,
        index=index,
        handler=_known_attention(pass_, cache, salient, kept, length),
        projected=projected,
    )
    if total is None:
        return None
    if kept.alive is not None:
        total = torch.where(kept.alive[..., None], total, g_kept.to(total.dtype))
    return g.to(total.dtype, copy=True).scatter_(1, columns, total)


@dataclass
class _Recomputed:
    """What the backward pass finds of a block's attention from the block's whole input.

    Attributes:
        probe: the attention's tensors, of all rows.
        projected: the projections of all rows, (B, S, width) each.
    """

    probe: AttentionProbe
    projected: list[Tensor]

    def fill(self, cache: _Cache, salient: SalientCall, kept: KeptTokens) -> list[Tensor]:
        """Put into the cache what a choice in the forward pass would have put there.

        Returns:
            The projections at the kept tokens, (B, K, width) each.
        """
        probe, rows = self.probe, kept.positions
        at_rows = probe.q.gather(2, rows[:, None, :, None].expand(-1, probe.q.shape[1], -1, probe.q.shape[-1]))
        output, lse = rows_attention(at_rows, probe.k, probe.v, probe.rule, rows)
        cache.output, cache.lse = kept.blank(output.transpose(1, 2).contiguous()), _blank_lse(lse, kept)
        if salient.settings.backward_keys == "all":
            cache.keys, cache.values = probe.k, probe.v
        cache.hidden = kept.take(cache.hidden)
        return [kept.take(p) for p in self.projected]


def _recompute(pass_: Pass, hidden: Tensor, salient: SalientCall, kwargs: dict[str, Any]) -> _Recomputed | None:
    """Look at the attention again; ``None`` where it drops out, so that its output depends on random numbers for all
    rows.
    """
    call = pass_.call
    probe = AttentionProbe(part(call.layer, call.layout.attention), salient.tokens, run=False)
    pass_.prepare_head()
    projected = project(pass_, hidden.reshape(-1, hidden.shape[-1]), hidden.shape)
    attend(call, projected, hidden, kwargs, probe)
    return _Recomputed(probe, projected) if probe.dropout == 0.0 else None


def _gradient_scores(g: Tensor, found: _Recomputed | None, salient: SalientCall) -> Tensor:
    """How much gradient comes to each token, (B, S): its own, and through the attention of the rows with the most.

    A key that is left out takes the gradient of all rows that look at it with it, so that own gradients alone would
    drop what prompts get. Without a look at the attention own gradients have to do.
    """
    own = gradient_saliency(g)
    if found is None:
        return own
    probe, budget = found.probe, salient.settings.token_budget
    asked = budget_tokens(_ADAPTIVE_ASKED if isinstance(budget, str) else budget, g.shape[1])
    rows = own.topk(asked, dim=1).indices.sort(1).values
    through = attention_saliency(probe.q, probe.k, probe.rule, rows, weights=own.gather(1, rows))
    return own + through / probe.q.shape[1]


def _blank_lse(lse: Tensor, kept: KeptTokens) -> Tensor:
    """``lse`` (B, H, K) with +inf in dead slots, so that their probabilities are 0 whatever their scores."""
    return lse if kept.alive is None else lse.masked_fill(~kept.alive[:, None], float("inf"))


def _known_attention(pass_: Pass, cache: _Cache, salient: SalientCall, kept: KeptTokens, length: int) -> Handler:
    """Stands for the attention function at the kept tokens, whose output is known."""
    name = implementation(part(pass_.call.layer, pass_.call.layout.attention))
    output, lse, keys, values = cache.output, cache.lse, cache.keys, cache.values
    assert output is not None and lse is not None
    known_output = output.transpose(1, 2)

    def known(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        rule = score_rule(module, name, (length, query.shape[-1]), attention_mask, salient.tokens, kwargs)
        o = KeptAttention.apply(query, key, value, known_output, lse, rule, kept.positions, keys, values)
        return o.transpose(1, 2), None

    return known


def _arguments_at(kwargs: dict[str, Any], positions: Tensor, length: int) -> dict[str, Any]:
    """The layer's arguments at some tokens: what is (B or 1, S, ...) becomes (B, K, ...); the mask stays whole."""
    batch = len(positions)

    def at(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[0] not in (1, batch) or leaf.shape[1] != length:
            return leaf
        index = positions.view(*positions.shape, *[1] * (leaf.dim() - 2)).expand(-1, -1, *leaf.shape[2:])
        return leaf.expand(batch, *leaf.shape[1:]).gather(1, index)

    return {name: value if name == "attention_mask" else tree_map(at, value) for name, value in kwargs.items()}


def _own_storage(x: Tensor) -> Tensor:
    """``x`` in a storage of its own size: a view would keep the whole of a fused projection alive."""
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x
