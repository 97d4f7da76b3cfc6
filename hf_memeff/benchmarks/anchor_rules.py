"""Selection rules side by side, each with its main parameter as the one thing to tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_memeff.benchmarks.anchor_peers import (
    FlexPrefill,
    XAttention,
    sinks_window,
    vertical_slash,
    vertical_slash_sums,
)
from hf_memeff.benchmarks.anchor_qkv import Qkv
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.sweep import LOG2_E
from hf_memeff.ops.anchor.tiling import Segment, segment_tiles
from hf_memeff.ops.anchor.torch_backend import TileAttention

Select = Callable[[int, float, Tensor], Tensor]
"""(query head, parameter, positions (R,)) -> keys that these rows attend to, (R, N) bool, not yet causal."""

ANCHOR = "anchor"
ONE_THETA = "anchor-one-theta"
TITLES = {
    ANCHOR: "AnchorAttention, calibrated",
    ONE_THETA: "AnchorAttention, one threshold",
    "sinks-window": "sinks + window (StreamingLLM)",
    "vertical-slash": "vertical-slash (MInference)",
    "flexprefill": "FlexPrefill",
    "xattention": "antidiagonal blocks (XAttention)",
}

_MOST_LOGITS = 40.0  # between a pooled query's score and an anchor; thresholds beyond it change nothing


@dataclass(frozen=True)
class Rule:
    """A selection rule with its fixed settings.

    Attributes:
        method: key of `TITLES`.
        variant: the fixed settings, in words; empty if there are none to choose.
        prepare: computes what does not depend on the parameter, for all heads of a layer.
        value: the parameter's value at a share from 0 (keeps least) to 1 (keeps everything it can), of N keys.
    """

    method: str
    variant: str
    prepare: Callable[[Qkv], Select]
    value: Callable[[float, int], float]


def anchor_selection(qkv: Qkv, step: int) -> Select:
    """AnchorAttention's own rule at a superblock of so many blocks; the parameter is theta."""
    tokens = qkv.q.shape[2]
    config = AnchorAttentionConfig(step=step, min_length=1)
    k, v = qkv.k[0], qkv.v[0]
    tiles = list(segment_tiles(Segment(0, 0, tokens, 0, tokens), config))
    margins: dict[int, Tensor] = {}
    for tile in tiles:
        if tile.candidates:
            q = qkv.q[0, :, tile.start : tile.stop].unflatten(0, (len(k), -1))
            lse = q.new_empty(q.shape[:3])
            work = TileAttention(tile, q, v.new_empty(*q.shape[:3], v.shape[-1]), lse, k, v, qkv.scale)
            margins[tile.start] = work.margins(work.init_and_local(), config.block_size) / LOG2_E

    def select(head: int, theta: float, rows: Tensor) -> Tensor:
        mask = torch.ones(len(rows), tokens, dtype=torch.bool)
        for tile in tiles:
            if tile.candidates:
                inside = (rows >= tile.start) & (rows < tile.stop)
                kept = margins[tile.start][head] >= -theta
                mask[inside, tile.first_candidate : tile.last_candidate] = kept
        return mask

    return select


def _sinks_window(qkv: Qkv) -> Select:
    return lambda head, window, rows: sinks_window(rows, qkv.k.shape[2], round(window))


def _per_head(qkv: Qkv) -> list[tuple[Tensor, Tensor, float]]:
    group = qkv.q.shape[1] // qkv.k.shape[1]
    return [(q, qkv.k[0, head // group], qkv.scale) for head, q in enumerate(qkv.q[0])]


def _vertical_slash(slash_ratio: float) -> Callable[[Qkv], Select]:
    def prepare(qkv: Qkv) -> Select:
        sums = [vertical_slash_sums(*head, last=64) for head in _per_head(qkv)]
        return lambda head, count, rows: vertical_slash(*sums[head], rows, round(count), slash_ratio)

    return prepare


def _flexprefill(qkv: Qkv) -> Select:
    heads = [FlexPrefill(*head) for head in _per_head(qkv)]
    return lambda head, gamma, rows: heads[head].mask(rows, gamma)


def _xattention(qkv: Qkv) -> Select:
    heads = [XAttention(*head) for head in _per_head(qkv)]
    return lambda head, threshold, rows: heads[head].mask(rows, threshold)


def _count(share: float, keys: int) -> float:
    """From 1 to N, evenly on a logarithmic scale."""
    return keys**share


def _share(share: float, keys: int) -> float:
    return share


def _logits(share: float, keys: int) -> float:
    return (2 * share - 1) * _MOST_LOGITS


RULES = (
    *(Rule(ONE_THETA, f"step {step}", partial(anchor_selection, step=step), _logits) for step in (16, 8, 4)),
    Rule("sinks-window", "", _sinks_window, _count),
    *(Rule("vertical-slash", f"{ratio:g} slashes a vertical", _vertical_slash(ratio), _count) for ratio in (0.2, 1, 6)),
    Rule("flexprefill", "", _flexprefill, _share),
    Rule("xattention", "stride 8", _xattention, _share),
)
"""All that are tuned; of a method's variants, the one with the lowest density counts."""
