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


@dataclass(frozen=True)
class _Way:
    loss: float
    seconds: float
    density: float
    sparse_calls: int


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
        """Measure the texts that are not there, and write the result after each. Which way goes first alternates."""
        tokens = self.plan.tokens
        for number in range(self._done(), self.plan.texts):
            if self.calibrations.missing(tokens):
                self.advance(f"{tokens}: calibration", 0)
            config = self.calibrations.get(tokens)
            ids = self.text.measured(tokens, number)
            ways = {}
            for name in ("sdpa", "anchor") if number % 2 == 0 else ("anchor", "sdpa"):
                self.advance(f"text {number + 1}, {name}", 0)
                ways[name] = self._way(name, ids, config)
                self.advance(f"text {number + 1}", 1)
            self.shelf.add(self._with_text(number, ways["anchor"], ways["sdpa"], config))

    def steps(self) -> int:
        """How many steps `run` will report to `advance`."""
        return 2 * max(0, self.plan.texts - self._done())

    def _way(self, name: str, ids: Tensor, config: AnchorAttentionConfig) -> _Way:
        model = for_length(self.base, self.plan.tokens)
        with attention(model, name, config):
            states, seconds = _prefill(model, ids)
            report = anchor_report(model)
        return _Way(next_token_loss(model, states, ids), seconds, report.density, report.sparse_calls)

    def _with_text(self, number: int, ours: _Way, dense: _Way, config: AnchorAttentionConfig) -> PrefillResult:
        """The result with one more text, each of which has as many candidates."""
        before = self._found() if number else None
        return PrefillResult(
            model=self.plan.model,
            tokens=self.plan.tokens,
            setting=CALIBRATED,
            step=config.step,
            calibration_tokens=self.calibrations.tokens,
            density=((before.density * number if before else 0.0) + ours.density) / (number + 1),
            sparse_calls=(before.sparse_calls if before else 0) + ours.sparse_calls,
            losses=(*(before.losses if before else ()), ours.loss),
            dense_losses=(*(before.dense_losses if before else ()), dense.loss),
            seconds=(*(before.seconds if before else ()), ours.seconds),
            dense_seconds=(*(before.dense_seconds if before else ()), dense.seconds),
            clock=steady_clock("cpu"),
            environment=self.environment,
        )

    def _done(self) -> int:
        """How many texts are there."""
        found = self._found()
        return len(found.losses) if found else 0

    def _found(self) -> PrefillResult | None:
        found = self.shelf.find(f"{self.plan.tokens}-{CALIBRATED}")
        if found is None or not found.environment.comparable(self.environment):
            return None
        wanted = self.plan.model, self.calibrations.tokens
        return found if (found.model, found.calibration_tokens) == wanted else None


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
