"""The op: AnchorAttention against torch's own attention on real queries, keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hf_memeff.benchmarks.anchor_calibrations import TARGET_RECALL, Calibrations
from hf_memeff.benchmarks.anchor_qkv import Qkv, QkvStore, for_length, rope_factor
from hf_memeff.benchmarks.anchor_results import OpResult, op_key
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.benchmarks.comparison import steady_clock, timed
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.integrations.attention import AnchorAttentionConfig, anchor_attention_forward, set_anchor_config
from hf_memeff.memory import measure_peak_memory
from hf_memeff.ops.anchor.dispatch import anchor_attention
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import Segment, segment_tiles

CALIBRATED, LOOSE, DEFAULT = "calibrated", "calibrated-0.9", "theta-12"
SETTINGS = (CALIBRATED, LOOSE, DEFAULT)
TARGETS = {CALIBRATED: TARGET_RECALL, LOOSE: 0.9}
"""What is asked of `calibrate_anchor`, which holds it in every tile and for the output's error too, so that the recall
over a whole text is above it."""

LENGTHS = (2048, 4096, 8192, 16384, 32768)

_FEW_LAYERS = 6
_LONGEST_WITH_EVERY_LAYER = 8192


@dataclass(frozen=True)
class OpPlan:
    """What every measurement has in common.

    Attributes:
        model: name of the model.
        layers: which to measure; empty for all up to 8192 tokens, and six spread evenly beyond.
        rounds: timed rounds.
    """

    model: str = "SmolLM2-135M"
    layers: tuple[int, ...] = ()
    rounds: int = 3

    def layers_at(self, tokens: int, total: int) -> list[int]:
        """The layers to measure at a length, of a model with so many."""
        if self.layers:
            return [layer for layer in self.layers if layer < total]
        if tokens <= _LONGEST_WITH_EVERY_LAYER or total <= _FEW_LAYERS:
            return list(range(total))
        return [round(index * (total - 1) / (_FEW_LAYERS - 1)) for index in range(_FEW_LAYERS)]


class Attention(nn.Module):
    """What the attention functions need to know of a decoder's attention module: one layer of it, without weights.

    Args:
        layer: index of the layer.
        groups: query heads per key-value head.
    """

    is_causal = True

    def __init__(self, layer: int, groups: int) -> None:
        super().__init__()
        self.layer_idx, self.num_key_value_groups = layer, groups
        self.eval()


@dataclass
class Ops:
    """The measurements of a model's layers.

    Attributes:
        plan: what they have in common.
        base: the `PreTrainedModel`.
        text: to measure on.
        calibrations: thresholds, from other text.
        folder: where queries, keys and values go.
        shelf: where results go.
        environment: what is measured with; results of another one are measured again, since times are compared.
        advance: called with the name of what runs and the number of steps just done.
    """

    plan: OpPlan
    base: Any
    text: LongText
    calibrations: Calibrations
    folder: Path
    shelf: Shelf[OpResult]
    environment: Environment
    advance: Callable[[str, int], object] = lambda text, steps: None

    def run(self, lengths: Sequence[int]) -> None:
        """Measure every length's layers whose results are not there, or have too few rounds."""
        for tokens in lengths:
            todo = self._todo(tokens)
            if not todo:
                continue
            store = QkvStore(self.folder, f"{tokens}")
            store.fill(for_length(self.base, tokens), self.text.measured(tokens), todo, self.advance)
            configs = {DEFAULT: AnchorAttentionConfig()}
            for name, target in TARGETS.items():
                if self.calibrations.missing(tokens, target):
                    self.advance(f"{tokens}: calibration for {target}", 0)
                configs[name] = self.calibrations.get(tokens, target)
            for layer in todo:
                self._layer(tokens, layer, store.load(layer), configs)

    def steps(self, lengths: Sequence[int]) -> int:
        """How many steps `run` will report to `advance`."""
        todo = {tokens: self._todo(tokens) for tokens in lengths}
        extracted = sum(len(QkvStore(self.folder, f"{tokens}").missing(layers)) for tokens, layers in todo.items())
        return extracted + sum(map(len, todo.values())) * (len(SETTINGS) + self.plan.rounds)

    def _todo(self, tokens: int) -> list[int]:
        layers = self.plan.layers_at(tokens, self.base.config.num_hidden_layers)
        return [layer for layer in layers if not all(self._found(tokens, layer, name) for name in SETTINGS)]

    def _found(self, tokens: int, layer: int, setting: str) -> bool:
        found = self.shelf.find(op_key(tokens, layer, setting))
        if found is None or not found.environment.comparable(self.environment):
            return False
        calibrated = self.calibrations.tokens if setting in TARGETS else None
        return (found.model, found.calibration_tokens) == (self.plan.model, calibrated) and (
            len(found.seconds) >= self.plan.rounds
        )

    def _layer(self, tokens: int, layer: int, qkv: Qkv, configs: Mapping[str, AnchorAttentionConfig]) -> None:
        dense = attend(qkv, AnchorAttentionConfig(min_length=tokens + 1), layer)  # warms the kernels up, too
        groups = qkv.q.shape[1] // qkv.k.shape[1]
        calls: dict[str, Callable[[], Tensor]] = {"sdpa": partial(_sdpa, Attention(layer, groups), qkv)}
        results: dict[str, OpResult] = {}
        for name in SETTINGS:
            config = configs[name]
            self.advance(f"{tokens}, layer {layer}, {name}: recall", 0)
            results[name] = self._quality(tokens, layer, name, qkv, config, dense)
            module = Attention(layer, groups)
            set_anchor_config(module, own_layer(config, layer))
            calls[name] = partial(_anchor, module, qkv)
            self.advance(f"{tokens}, layer {layer}", 1)
        order, clock = list(calls), steady_clock("cpu")
        seconds: dict[str, list[float]] = {name: [] for name in order}
        for index in range(self.plan.rounds):
            self.advance(f"{tokens}, layer {layer}: time", 0)
            for name in order[index % len(order) :] + order[: index % len(order)]:
                seconds[name].append(timed(calls[name], "cpu", clock))
            self.advance(f"{tokens}, layer {layer}", 1)
        for name, result in results.items():
            own = tuple(seconds[name])
            self.shelf.add(replace(result, seconds=own, sdpa_seconds=tuple(seconds["sdpa"]), clock=clock))

    def _quality(
        self, tokens: int, layer: int, setting: str, qkv: Qkv, config: AnchorAttentionConfig, dense: AnchorResult
    ) -> OpResult:
        peak = measure_peak_memory(partial(attend, qkv, config, layer), "cpu")
        found: AnchorResult = peak.result
        recall = kept_mass(found, dense, config)
        return OpResult(
            model=self.plan.model,
            tokens=tokens,
            rope_factor=rope_factor(self.base, tokens),
            layer=layer,
            setting=setting,
            step=config.step,
            calibration_tokens=self.calibrations.tokens if setting in TARGETS else None,
            path="sparse" if found.sparse_tiles else "kept share" if found.dense_tiles else "short",
            density=found.kept / found.candidates if found.candidates else 1.0,
            attended_share=attended_share(found, config),
            recall=recall.mean().item(),
            recall_5th=recall.flatten().kthvalue(max(1, round(0.05 * recall.numel()))).values.item(),
            output_error=((found.out - dense.out).norm() / dense.out.norm()).item(),
            temporary_bytes=None if peak.peak_bytes is None else peak.peak_bytes - found.out.nbytes,
            q_bytes=qkv.q.nbytes,
            seconds=(),
            sdpa_seconds=(),
            clock="",
            environment=self.environment,
        )


def own_layer(config: AnchorAttentionConfig, layer: int) -> AnchorAttentionConfig:
    """Settings without the thresholds of other layers."""
    if config.thresholds is None:
        return config
    return replace(config, thresholds={layer: config.thresholds[layer]})


def attend(qkv: Qkv, config: AnchorAttentionConfig, layer: int) -> AnchorResult:
    """AnchorAttention of a layer with its log-sum-exp and kept keys."""
    heads, tokens = qkv.q.shape[1:3]
    return anchor_attention(
        qkv.q,
        qkv.k,
        qkv.v,
        segments=[_whole(tokens)],
        thetas=config.head_thresholds(layer, heads),
        config=config,
        scale=qkv.scale,
        return_kept=True,
    )


def kept_mass(found: AnchorResult, dense: AnchorResult, config: AnchorAttentionConfig) -> Tensor:
    """(H, rows): share of attention mass on attended keys, in the rows that have candidates, or in all."""
    share = (found.lse - dense.lse)[0].exp_().clamp_(max=1.0)
    tiles = segment_tiles(_whole(share.shape[1]), config)
    chosen = [torch.arange(tile.start, tile.stop) for tile in tiles if tile.candidates]
    return share[:, torch.cat(chosen)] if chosen else share


def attended_share(found: AnchorResult, config: AnchorAttentionConfig) -> float:
    """Share of all causal pairs of query and key that were attended, over the heads."""
    heads, tokens = found.lse.shape[1:]
    tiles = {tile.start: tile for tile in segment_tiles(_whole(tokens), config)}
    left_out = 0
    for kept in found.kept_keys:
        tile = tiles[kept.start]
        left_out += (tile.stop - tile.start) * (tile.candidates - len(kept.positions))
    return 1 - left_out / (heads * tokens * (tokens + 1) / 2)


def _whole(tokens: int) -> Segment:
    return Segment(0, 0, tokens, 0, tokens)


@torch.no_grad()
def _anchor(module: nn.Module, qkv: Qkv) -> Tensor:
    return anchor_attention_forward(module, qkv.q, qkv.k, qkv.v, None, scaling=qkv.scale)[0]


@torch.no_grad()
def _sdpa(module: nn.Module, qkv: Qkv) -> Tensor:
    return AttentionInterface()["sdpa"](module, qkv.q, qkv.k, qkv.v, None, scaling=qkv.scale)[0]
