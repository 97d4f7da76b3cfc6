"""`attn_implementation="anchor"`: AnchorAttention as one of transformers' attention functions.

Sparse where that is right, else dense and equal to the model's eager attention, with the reason counted for
`anchor_report`. The name lives in transformers' two public registries, and nowhere in a saved model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from hf_memeff.integrations.anchor.calibrate import calibrate_anchor
from hf_memeff.integrations.anchor.calls import attend_densely, attend_sparsely, dense_reason, read_call
from hf_memeff.integrations.anchor.masks import anchor_mask, is_traced
from hf_memeff.integrations.anchor.report import AnchorReport, LayerReport, anchor_report
from hf_memeff.integrations.anchor.settings import layer_state, set_anchor_config, use_anchor_config
from hf_memeff.ops.anchor.config import AnchorAttentionConfig

__all__ = [
    "NAME",
    "AnchorAttentionConfig",
    "AnchorReport",
    "LayerReport",
    "anchor_attention_forward",
    "anchor_mask",
    "anchor_report",
    "calibrate_anchor",
    "register_anchor",
    "set_anchor_config",
    "unregister_anchor",
    "use_anchor_config",
]

NAME = "anchor"

_UNSUPPORTED = ("sinks", "indices", "block_indices", "block_table")
"""Arguments of other attention functions that choose keys or change the softmax, and that nothing here reads."""


def register_anchor() -> None:
    """Add "anchor" to transformers' attention functions and mask functions; doing it twice changes nothing.

    The mask function is not optional: without one transformers passes no mask at all, and padding would be attended to.
    """
    AttentionInterface.register(NAME, anchor_attention_forward)
    AttentionMaskInterface.register(NAME, anchor_mask)


def unregister_anchor() -> None:
    """Take "anchor" out again; models that were loaded with it must be given another implementation first."""
    # transformers 5.24 has a public way in, and none out
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


def anchor_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One attention layer, as transformers calls it.

    Args:
        module: the attention module. Its ``is_causal`` says whether rows see only what is before them; a module without
            it is causal only under a mask of `anchor_mask` that says so.
        query: (B, H, Nq, D).
        key: (B, Hkv, Nk, D), not repeated.
        value: (B, Hkv, Nk, Dv).
        attention_mask: what `anchor_mask` made, or a user's own (B, 1 or H, Nq, Nk).
        scaling: factor of the dot products; ``None`` is D^-0.5.
        dropout: probability of dropping a weight.
        is_causal: overrides the module's.
        kwargs: ``position_ids``, ``cu_seq_lens_q``, ``sliding_window``, ``softcap``, ``s_aux`` and ``position_bias``
            are read; others don't change attention.

    Returns:
        (B, Nq, H, Dv), and ``None``, because weights are never formed. Rows of padding are 0 or what transformers' sdpa
        makes of them.

    Raises:
        ValueError: attention weights are asked for, an argument that nothing here reads, thresholds that don't fit the
            model, or, with ``strict``, a dense call where a sparse one was wanted.
    """
    _refuse(kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    call = read_call(module, query, key, value, attention_mask, causal, scale, dropout, **kwargs)
    if is_traced(query.device):
        # a choice made now would be frozen in the program: dense, and nothing is counted
        return attend_densely(call), None
    state = layer_state(module)
    reason = dense_reason(call, state.config, state.layer)
    if state.observer is not None:
        if reason is None:
            state.observer(call, state)
        return attend_densely(call), None
    if reason is not None:
        state.dense_calls[reason] += 1
        return attend_densely(call), None
    result = attend_sparsely(call, state.config.head_thresholds(state.layer, query.shape[1]), state.config)
    state.count(result)
    return result.out.transpose(1, 2).contiguous(), None


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(
            'got output_attentions=True under attn_implementation="anchor", which never forms attention weights. '
            'Fix: model.set_attn_implementation("eager").'
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f'got the attention argument {name!r} under attn_implementation="anchor", which does not know it. '
                'Fix: load this model with attn_implementation="eager".'
            )
