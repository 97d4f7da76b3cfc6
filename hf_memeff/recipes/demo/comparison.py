"""The demo's table: the methods on one and the same step of the demo's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_memeff.benchmarks.comparison import (
    EXACT_METHODS,
    METHODS,
    MethodFigures,
    compare,
    fill_adapters,
    with_shared_weights,
    wrap,
)
from hf_memeff.recipes.demo.training import LORA_FIELDS

_LENGTHS = (512, 256, 128)
_SLOWEST_METHOD = 1.4
"""Seconds per token of gradient checkpointing with whole logits, relative to a training step of the demo."""


@dataclass(frozen=True)
class ComparisonPlan:
    """How much to measure.

    Attributes:
        tokens: length of the one sequence.
        rounds: timed rounds.
        seconds: estimate for all of it.
    """

    tokens: int
    rounds: int
    seconds: float


def compared_methods(method: str) -> tuple[str, ...]:
    """The methods of the table: the exact ones, and the one that was trained with."""
    return tuple(name for name in METHODS if name in EXACT_METHODS or name == method)


def plan_comparison(
    token_seconds: float, steps: int, available_seconds: float, methods: int = len(EXACT_METHODS)
) -> ComparisonPlan:
    """Choose length and rounds: more rounds the longer the training was, and what fits into the time.

    Args:
        token_seconds: seconds per token of a training step.
        steps: optimizer steps of the training; after a short one the comparison is short too.
        available_seconds: not to be exceeded, if the shortest comparison allows.
        methods: how many are compared.

    Returns:
        The plan.
    """
    for tokens in _LENGTHS:
        for rounds in range(max(1, min(5, steps // 10)), 0, -1):
            plan = _plan(token_seconds, tokens, rounds, methods)
            if plan.seconds <= available_seconds:
                return plan
    return shortest_comparison(token_seconds, methods)


def shortest_comparison(token_seconds: float, methods: int = len(EXACT_METHODS)) -> ComparisonPlan:
    """The plan that takes the least time."""
    return _plan(token_seconds, _LENGTHS[-1], 1, methods)


def _plan(token_seconds: float, tokens: int, rounds: int, methods: int) -> ComparisonPlan:
    # Each model runs once more than there are rounds, for its gradients and its peak.
    return ComparisonPlan(tokens, rounds, _SLOWEST_METHOD * token_seconds * tokens * methods * (rounds + 1))


def compare_methods(base: Any, method: str, plan: ComparisonPlan, device: str, deadline: float) -> list[MethodFigures]:
    """Measure LoRA, LoRA with gradient checkpointing, MeSP and the method that was trained with.

    All of them on the same weights, adapter values and random tokens.

    Args:
        base: the base model, without adapter; it stays so.
        method: one of `METHODS`.
        plan: what to measure.
        device: where ``base`` is.
        deadline: value of `time.monotonic` after which no further round starts.

    Returns:
        One entry per method.
    """
    models: dict[str, Any] = {
        name: wrap(with_shared_weights(base), name, **LORA_FIELDS) for name in compared_methods(method)
    }
    fill_adapters(list(models.values()))
    # Random tokens, since the reference has to be more exact than what it judges: on text that the model predicts well,
    # plain LoRA's own fp32 softmax puts its gradient 7e-5 from the fp64 one (MeSP: 5e-6).
    vocabulary = base.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, plan.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    with tqdm(total=len(models) * (plan.rounds + 1), unit="step") as bar:
        return compare(
            models,
            lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(),
            reference="lora",
            rounds=plan.rounds,
            device=device,
            deadline=deadline,
            after_step=bar.update,
        )
