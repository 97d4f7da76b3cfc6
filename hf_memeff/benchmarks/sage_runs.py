"""Which training runs there are, in which order, and which learning rate they get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_memeff.benchmarks.sage_methods import LORA, MESP, NAMES, SageMethod, expand
from hf_memeff.benchmarks.sage_results import LearningResult, learning_key
from hf_memeff.benchmarks.sage_text import DATA_SETS

SEEDS = (0, 1, 2)
LEARNING_NAMES = tuple(name for name in NAMES if name != "lora-checkpointing")
"""Methods that learn; checkpointing learns what LoRA learns."""

_FIRST_NAMES, _FIRST_BUDGET = ("sage-gradient", "sage-attention", "sage-random"), 0.25


@dataclass(frozen=True)
class LearningPlan:
    """What every run has in common.

    Attributes:
        model: name of the base model.
        steps: optimizer steps.
        rows_per_step: rows of a step.
        longest_row: most tokens of a row.
        rank: of the adapter.
        test_rows: held-out rows.
        rates: learning rates that LoRA is tried with.
    """

    model: str = "SmolLM2-135M"
    steps: int = 100
    rows_per_step: int = 4
    longest_row: int = 160
    rank: int = 16
    test_rows: int = 64
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        dataset: key of `DATA_SETS`.
        method: how to train.
        seed: of adapter, rows and random choices.
        rate: learning rate; None for LoRA's best.
    """

    dataset: str
    method: SageMethod
    seed: int
    rate: float | None = None

    def key(self, best_rate: float) -> str:
        """Name of its result."""
        rate = best_rate if self.rate is None else self.rate
        return learning_key(self.dataset, self.method, self.seed, rate)


def planned_runs(
    plan: LearningPlan,
    *,
    datasets: Sequence[str] = tuple(DATA_SETS),
    methods: Sequence[str] = (),
    budgets: Sequence[float],
    seeds: Sequence[int] = SEEDS,
    rates: Sequence[float] = (),
) -> list[Run]:
    """The runs that a command line asks for, the most telling first, since they may be interrupted.

    LoRA's rates on the first seed come first whatever is asked for: the others run with the best of them. Then the
    saliencies that the claims rest on, on one seed and on the others, then the rest.

    Args:
        plan: the learning rates.
        datasets: keys of `DATA_SETS`, one after the other.
        methods: names out of `LEARNING_NAMES`; empty for all.
        budgets: of SAGE.
        seeds: the first one chooses the rate. MeSP's gradients are LoRA's, so that it runs on this one alone.
        rates: out of the plan's, to train with instead of LoRA's best.

    Returns:
        The runs, none twice.
    """
    names = [name for name in LEARNING_NAMES if not methods or name in methods]
    wanted = expand([name for name in names if name.startswith("sage-")], budgets)
    first = [m for name in _FIRST_NAMES for m in wanted if m.name == name and m.token_budget == _FIRST_BUDGET]
    rest = [method for method in wanted if method not in first]
    runs: list[Run] = []
    for dataset in datasets:
        runs += [Run(dataset, LORA, seeds[0], rate) for rate in plan.rates]
        for rate in rates or (None,):
            runs += [Run(dataset, method, seeds[0], rate) for method in first]
            # LoRA with a seed is what the share recovered with that seed is taken of, so it is never left out.
            runs += [Run(dataset, LORA, seed, rate) for seed in seeds[1:]]
            runs += [Run(dataset, method, seed, rate) for seed in seeds[1:] for method in first]
            runs += [Run(dataset, MESP, seeds[0], rate)] if MESP.name in names else []
            runs += [Run(dataset, method, seed, rate) for seed in seeds for method in rest]
    return runs


def best_rate(results: Iterable[LearningResult], dataset: str, rates: Sequence[float]) -> float | None:
    """LoRA's learning rate with the lowest held-out loss, on the one seed that all were tried with; None until then."""
    losses: dict[int, dict[float, float]] = {}
    for result in results:
        if result.dataset == dataset and result.method == LORA.name:
            # a run that diverged has no comparable loss
            loss = result.test_loss if math.isfinite(result.test_loss) else math.inf
            losses.setdefault(result.seed, {})[result.learning_rate] = loss
    tried = [losses[seed] for seed in sorted(losses) if set(rates) <= set(losses[seed])]
    return min(rates, key=tried[0].__getitem__) if tried else None
