"""The approximate gradient of a salient block written out with autograd, and a way to say which tokens are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_memeff.blocks.batch_tokens import BatchTokens
from hf_memeff.blocks.options import SalientTokens
from hf_memeff.ops.selection import KeptTokens


@dataclass(frozen=True)
class GivenTokens:
    """A ``SalientCall`` whose choice was made before."""

    settings: SalientTokens
    kept: KeptTokens
    whole: bool = False
    tokens: BatchTokens = field(default_factory=BatchTokens)

    def choose(self, scores: Tensor | None, shape: tuple[int, int], device: torch.device) -> KeptTokens:
        return self.kept


def kept_tokens(rows: list[list[int]]) -> KeptTokens:
    """Kept positions per sequence; shorter lists are filled with dead slots at other positions."""
    longest = max(map(len, rows))
    positions, alive = [], []
    for row in rows:
        others = [i for i in range(longest + max(map(max, filter(None, rows)))) if i not in row]
        positions.append(row + others[: longest - len(row)])
        alive.append([True] * len(row) + [False] * (longest - len(row)))
    mask = torch.tensor(alive)
    return KeptTokens(torch.tensor(positions), None if mask.all() else mask)


def llama_reference(
    layer: nn.Module, h: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, kept: Tensor, keys: str
) -> Tensor:
    """One Llama block by autograd, with everything that depends on a token outside ``kept`` (B, S) made a constant.

    Keys, values, queries and branch outputs of such tokens are detached, under ``keys="kept"`` the logits towards them
    too; their residual stream passes through.
    """
    batch, length, width = h.shape
    attention = layer.self_attn

    def only_kept(x: Tensor) -> Tensor:
        return torch.where(kept[..., None], x, x.detach())

    x = layer.input_layernorm(h)
    heads = (batch, length, -1, attention.head_dim)
    q, k, v = (
        only_kept(p(x)).view(heads).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    k, v = (t.repeat_interleave(attention.num_key_value_groups, dim=1) for t in (k, v))
    logits = (q @ k.transpose(-1, -2) * attention.scaling).masked_fill(~mask, float("-inf"))
    if keys == "kept":
        logits = torch.where(kept[:, None, None, :], logits, logits.detach())
    attended = (logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
    h1 = h + only_kept(attention.o_proj(attended))
    return h1 + only_kept(layer.mlp(layer.post_attention_layernorm(h1)))
