"""Prefill of a whole model: time and next-token loss, densely and with AnchorAttention, on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_op import CALIBRATED
from hf_memeff.benchmarks.anchor_qkv import for_length
from hf_memeff.benchmarks.anchor_results import PrefillResult
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.benchmarks.comparison import steady_clock, timed
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.integrations.attention import AnchorAttentionConfig, anchor_report, use_anchor_config

_LOGIT_ROWS = 512  # of a vocabulary of 49,152 in float32: 96 MiB


@dataclass(frozen=True)
class PrefillPlan:
    """What is prefilled.

    Attributes:
        model: name of the model.
        tokens: N.
        texts: passages of N tokens, each prefilled once each way.
    """

    model: str = "SmolLM2-135M"
    tokens: int = 8192
    texts: int = 3


@dataclass
class Prefills:
    """The prefills of a model.

    Attributes:
        plan: what is prefilled.
        base: the `PreTrainedModel`.
        text: to measure on.
        calibrations: thresholds, from other text.
        shelf: where the result goes.
        environment: what is measured with; a result of another one is measured again.
        advance: called with the name of what runs and the number of steps just done.
    """

    plan: PrefillPlan
    base: Any
    text: LongText
    calibrations: Calibrations
    shelf: Shelf[PrefillResult]
    environment: Environment
    advance: Callable[[str, int], object] = lambda text, steps: None

    def run(self) -> None:
        """Measure what is not there. Which way goes first alternates from text to text."""
        if self._found():
            return
        tokens = self.plan.tokens
        if self.calibrations.missing(tokens):
            self.advance(f"{tokens}: calibration", 0)
        config = self.calibrations.get(tokens)
        model = for_length(self.base, tokens)
        kept = candidates = sparse_calls = 0
        losses: dict[str, list[float]] = {"sdpa": [], "anchor": []}
        seconds: dict[str, list[float]] = {"sdpa": [], "anchor": []}
        for number in range(self.plan.texts):
            ids = self.text.measured(tokens, number)
            for name in ("sdpa", "anchor") if number % 2 == 0 else ("anchor", "sdpa"):
                self.advance(f"text {number + 1}, {name}", 0)
                with attention(model, name, config):
                    states, took = _prefill(model, ids)
                    report = anchor_report(model)
                kept += sum(layer.kept for layer in report.layers)
                candidates += sum(layer.candidates for layer in report.layers)
                sparse_calls += report.sparse_calls
                losses[name].append(next_token_loss(model, states, ids))
                seconds[name].append(took)
                self.advance(f"text {number + 1}", 1)
        self.shelf.add(
            PrefillResult(
                model=self.plan.model,
                tokens=tokens,
                setting=CALIBRATED,
                step=config.step,
                calibration_tokens=self.calibrations.tokens,
                density=kept / candidates if candidates else 1.0,
                sparse_calls=sparse_calls,
                losses=tuple(losses["anchor"]),
                dense_losses=tuple(losses["sdpa"]),
                seconds=tuple(seconds["anchor"]),
                dense_seconds=tuple(seconds["sdpa"]),
                clock=steady_clock("cpu"),
                environment=self.environment,
            )
        )

    def steps(self) -> int:
        """How many steps `run` will report to `advance`."""
        return 0 if self._found() else 2 * self.plan.texts

    def _found(self) -> bool:
        found = self.shelf.find(f"{self.plan.tokens}-{CALIBRATED}")
        if found is None or not found.environment.comparable(self.environment):
            return False
        wanted = self.plan.model, self.calibrations.tokens
        return (found.model, found.calibration_tokens) == wanted and len(found.losses) >= self.plan.texts


@contextmanager
def attention(model: Any, name: str, config: AnchorAttentionConfig) -> Iterator[None]:
    """Another attention implementation, and settings of AnchorAttention, inside of a ``with`` block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        with use_anchor_config(model, config):
            yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def _prefill(model: Any, ids: Tensor) -> tuple[Tensor, float]:
    """Last hidden states (1, N, hidden) and seconds."""
    outputs = []
    took = timed(lambda: outputs.append(model.base_model(input_ids=ids, use_cache=True)), "cpu", steady_clock("cpu"))
    return outputs[0].last_hidden_state, took


@torch.no_grad()
def next_token_loss(model: Any, states: Tensor, ids: Tensor) -> float:
    """Mean cross-entropy of each token after the first, from the last hidden states (1, N, hidden) before it."""
    head = model.get_output_embeddings()
    total = 0.0
    for start in range(0, ids.shape[1] - 1, _LOGIT_ROWS):
        stop = min(start + _LOGIT_ROWS, ids.shape[1] - 1)
        logits = head(states[0, start:stop]).float()
        total += F.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="sum").item()
    return total / (ids.shape[1] - 1)
