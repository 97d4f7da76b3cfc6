"""Stand between a layer's attention module and its attention function: see what it is called with, or answer for it.

transformers' attention modules look their function up by the name in their config. A shallow copy of the module with a
config of ours finds our function there; the module, its config and the model's settings are not touched.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.blocks.batch_tokens import BatchTokens, packed_segments
from hf_memeff.ops.attention import ScoreRule, flash_forward, rows_attention

NAME = "hf_memeff_probe"
_HANDLER = "_hf_memeff_handler"
_REGISTRY, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"

_VERIFIED_ROWS = 8
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_verified: set[tuple[Any, ...]] = set()

Handler = Callable[..., tuple[Tensor, Any]]


class UnscorableAttention(RuntimeError):
    """The attention does not run through transformers' registry, or is called with something we cannot read."""


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.__dict__[_HANDLER](module, *args, **kwargs)


def install(shadow: nn.Module, handler: Handler) -> None:
    """Have ``handler`` called in place of the attention function of ``shadow``, a copy of an attention module.

    Raises:
        UnscorableAttention: the module does not look its function up.
    """
    registry = getattr(sys.modules.get(type(shadow).__module__), _REGISTRY, None)
    config = getattr(shadow, "config", None)
    if getattr(shadow, "reorder_and_upcast_attn", False):  # GPT-2: under another name it would take another branch
        raise UnscorableAttention(f"{type(shadow).__name__} computes it by itself (reorder_and_upcast_attn)")
    if registry is None or config is None or not hasattr(registry, "register"):
        raise UnscorableAttention(f"{type(shadow).__name__} does not look its attention function up by name")
    if NAME not in registry:
        registry.register(NAME, _dispatch)
    config = copy.copy(config)
    config.__dict__["_attn_implementation_internal"] = NAME
    shadow.__dict__["config"] = config
    shadow.__dict__[_HANDLER] = handler


class AttentionProbe:
    """A handler that lets the model's own function run and keeps what it was called with.

    Attributes:
        q: (B, H, S, dh), rotated and normed as the function got it.
        k: (B, Hkv, S, dh).
        v: (B, Hkv, S, dv).
        output: (B, S, H, dv), what the function gave.
        lse: (B, H, S) where its kernel gives it, else ``None``.
        rule: how it makes scores.
        dropout: probability of the attention dropout in this call.
        called: whether the module called the function at all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor | None = None
    rule: ScoreRule
    dropout: float = 0.0
    called: bool = False

    def __init__(self, attention: nn.Module, tokens: BatchTokens, *, run: bool = True) -> None:
        self._name = implementation(attention)
        self._tokens, self._run = tokens, run

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        self.called = True
        self.q, self.k, self.v = query, key, value
        extent = query.shape[2], query.shape[3]
        self.rule = score_rule(module, self._name, extent, attention_mask, self._tokens, kwargs)
        self.dropout = float(kwargs.get("dropout") or 0.0)
        if not self._run:
            return value.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]), None
        found = None
        if self._name == "sdpa" and self.dropout == 0.0 and self.rule.softcap is None:
            found = flash_forward(
                query, key, value, scale=self.rule.scale, causal=self.rule.causal, mask=self.rule.mask
            )
        if found is None:
            self.output, weights = original_function(module, self._name)(
                module, query, key, value, attention_mask, **kwargs
            )
            if self.dropout == 0.0:
                self._verify(module, attention_mask)
            return self.output, weights
        output, self.lse = found
        self.output = output.transpose(1, 2).contiguous()
        return self.output, None

    def forget(self) -> None:
        """Let go of the tensors."""
        del self.q, self.k, self.v, self.output, self.rule
        self.lse = None

    def _verify(self, module: nn.Module, mask: Any) -> None:
        """Compare some rows with what the function gave, once per kind of call: masks are read, and may be misread.

        Raises:
            UnscorableAttention: they differ.
        """
        rule = self.rule
        batch, length = self.q.shape[0], self.q.shape[2]
        # longer inputs are of another kind: a window that is not told of does not show in shorter ones
        as_read = type(mask), getattr(mask, "ndim", 0), rule.window, rule.segments is None, length.bit_length()
        kind = type(module), self._name, *as_read
        if kind in _verified:
            return
        rows = torch.linspace(0, length - 1, min(_VERIFIED_ROWS, length), device=self.q.device).long().expand(batch, -1)
        at_rows = self.q.gather(2, rows[:, None, :, None].expand(-1, self.q.shape[1], -1, self.q.shape[-1]))
        expected, lse = rows_attention(at_rows, self.k, self.v, rule, rows)
        given = self.output.gather(1, rows[..., None, None].expand(-1, -1, *self.output.shape[2:])).transpose(1, 2)
        sees = lse.isfinite() & (lse > torch.finfo(torch.float16).min)  # not a padded row, which may be anything
        if self._tokens.real_on(rows.device) is not None:
            sees &= self._tokens.real_on(rows.device).expand(batch, -1).gather(1, rows)[:, None]
        difference = (expected - given).double()[sees].norm() / given.double()[sees].norm().clamp_min(1e-12)
        if difference > _TOLERANCE.get(given.dtype, 1e-3):
            raise UnscorableAttention(
                f"what {self._name} attention gives differs by {float(difference):.0e} from its mask as it is read here"
            )
        _verified.add(kind)


def implementation(attention: nn.Module) -> str | None:
    """The name of the attention function that a module is set to."""
    return getattr(getattr(attention, "config", None), "_attn_implementation", None)


def original_function(module: nn.Module, name: str | None) -> Callable[..., Any]:
    """The attention function that a module would look up under its own config."""
    namespace = sys.modules[type(module).__module__]
    return getattr(namespace, _REGISTRY).get_interface(name, getattr(namespace, _EAGER, None))


def score_rule(
    module: nn.Module,
    name: str | None,
    extent: tuple[int, int],
    mask: Any,
    tokens: BatchTokens,
    kwargs: dict[str, Any],
) -> ScoreRule:
    """Read a call of an attention function (transformers' calling convention).

    Args:
        module: the attention module.
        name: the function it is set to.
        extent: number of tokens and size of a head.
        mask: the call's mask.
        tokens: what the batch says about its tokens.
        kwargs: the call's other arguments.

    Raises:
        UnscorableAttention: the mask is of a kind not known here, or a position bias is added.
    """
    if kwargs.get("position_bias") is not None:
        raise UnscorableAttention(f"{type(module).__name__} adds a position bias to its scores")
    length, head_size = extent
    is_causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    common: dict[str, Any] = {
        "scale": float(kwargs["scaling"]) if kwargs.get("scaling") is not None else head_size**-0.5,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return ScoreRule(**common, causal=False, mask=mask[..., :length, :length])
    if mask is None and name in ("sdpa", "eager"):
        return ScoreRule(**common, causal=causal and name == "sdpa")
    if hasattr(mask, "mask_mod"):
        return ScoreRule(**common, causal=False, mask_rows=_rows_of(mask, length))
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        # flash kernels mask by themselves: padding comes as (B, S); packing from the positions, of one row without mask
        window = kwargs.get("sliding_window")
        real = mask.bool() if mask is not None else None
        packed = mask is None and tokens.segments is not None and len(tokens.segments) == 1
        cumulative = kwargs.get("cu_seq_lens_q")
        segments = tokens.segments if packed else None
        if segments is None and cumulative is not None:
            segments = packed_segments(cumulative, length)
        return ScoreRule(**common, causal=causal, window=window, real=real, segments=segments)
    raise UnscorableAttention(f"its attention mask is a {type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}")


def _rows_of(block_mask: Any, length: int) -> Callable[[Tensor], Tensor]:
    """Rows of a flex attention mask, which is a function of indices."""

    def one(batch: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return block_mask.mask_mod(batch, torch.zeros_like(batch), row, column)

    over_columns = torch.vmap(one, in_dims=(None, None, 0))
    over_rows = torch.vmap(over_columns, in_dims=(None, 0, None))
    over_batch = torch.vmap(over_rows, in_dims=(0, 0, None))

    def mask_rows(rows: Tensor) -> Tensor:
        device = rows.device
        return over_batch(torch.arange(len(rows), device=device), rows, torch.arange(length, device=device))[:, None]

    return mask_rows
