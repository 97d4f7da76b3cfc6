"""Thresholds for a model's own layers and heads, from a text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.integrations.anchor.calls import AttentionCall
from hf_memeff.integrations.anchor.running import run_observed
from hf_memeff.integrations.anchor.settings import LayerState, layer_states
from hf_memeff.ops.anchor.calibration import Thresholds, least_thresholds
from hf_memeff.ops.anchor.config import LARGEST_THETA, AnchorAttentionConfig


def calibrate_anchor(model: nn.Module, input_ids: Tensor, target_recall: float = 0.95) -> AnchorAttentionConfig:
    """The least theta for each layer and head that keeps a share of the attention mass on a text.

    One dense forward pass, in which each layer computes its attention again, and its candidates' weights for a sample
    of the rows. Nothing is changed in the model: give the result to `set_anchor_config`, keep it with its ``save``.

    Args:
        model: a transformers model, wrapped by PEFT or not, under any attention implementation.
        input_ids: (B, N), a text like those to come and not one of them, without padding. The longer the better: the
            share holds in every superblock, and later ones are the harder. N has to exceed a superblock (2048) by far.
        target_recall: share of each row's attention mass to keep, mean over the rows of a superblock, in (0, 1]; a
            head's output may change by the rest of it, relative to its norm.

    Returns:
        The model's present settings with theta="auto" and the thresholds. Where these are the defaults, ``step`` is the
        default or half of it, whichever has fewer scores to compute on this text.

    Raises:
        ValueError: a target out of range, not a batch of token ids, a text too short for a layer to have candidates,
            or scores that are NaN.
    """
    if isinstance(target_recall, bool) or not isinstance(target_recall, (int, float)) or not 0 < target_recall <= 1:
        raise ValueError(
            f"calibrate_anchor got target_recall={target_recall!r}, expected a share above 0 and up to 1, such as 0.95."
        )
    base = next((state.config for _, _, state in layer_states(model)), AnchorAttentionConfig())
    # where nobody chose a superblock, half of the paper's is tried as well: on a CPU it often has less to compute
    steps = (base.step, base.step // 2) if base == AnchorAttentionConfig() else (base.step,)
    found: dict[int, dict[int, Thresholds]] = {step: {} for step in steps}

    def observe(call: AttentionCall, state: LayerState) -> None:
        for step in steps:
            config = replace(state.config, step=step)
            segments = call.segments or ()
            layer = least_thresholds(call.query, call.key, call.value, segments, config, call.scale, target_recall)
            before = found[step].get(state.layer)
            if layer is not None and before is not None:  # a layer that a model goes through twice
                layer = Thresholds(torch.maximum(layer.theta, before.theta), layer.scores + before.scores)
            if layer is not None:
                found[step][state.layer] = layer

    changes: dict[str, Any] = {"theta": 12.0, "thresholds": None, "min_length": 1, "dense_tail": 0, "strict": False}
    run_observed(model, input_ids, observe, **changes)
    if not found[base.step]:
        superblock = base.block_size * base.step
        raise ValueError(
            f"calibrate_anchor got {input_ids.shape[1]} tokens, in which no layer has keys to choose from, expected "
            f"well over {superblock}. Fix: pass a longer text, and a model with causal full-attention layers."
        )
    step = min(steps, key=lambda step: sum(layer.scores for layer in found[step].values()))
    rows = {
        layer: [_written(x, layer) for x in calibrated.theta.tolist()]
        for layer, calibrated in sorted(found[step].items())
    }
    return replace(base, theta="auto", thresholds=rows, step=step)


def _written(theta: float, layer: int) -> float:
    """A threshold as a config takes it: rounded upwards, so that the key that just reaches the target is kept."""
    if math.isnan(theta):
        raise ValueError(
            f"calibrate_anchor got scores of layer {layer} that are not numbers, expected finite queries and keys. "
            "Fix: load the model in bfloat16 or float32, and look for NaN in its weights."
        )
    return math.inf if theta > LARGEST_THETA else math.ceil(max(theta, -LARGEST_THETA) * 1e4) / 1e4
