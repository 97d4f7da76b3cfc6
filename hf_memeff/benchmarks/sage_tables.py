"""SAGE's results as Markdown; what is planned and not measured is named."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from hf_memeff.benchmarks.sage_learning import BASE, LEARNING_NAMES, SEEDS
from hf_memeff.benchmarks.sage_methods import BUDGETS, LORA, MESP, SageMethod, expand
from hf_memeff.benchmarks.sage_results import LearningResult
from hf_memeff.benchmarks.tables import NOT_MEASURED, table


def chosen_lora(results: Iterable[LearningResult], dataset: str) -> dict[int, LearningResult]:
    """LoRA's runs by seed: with several rates, the one with the lowest held-out loss."""
    chosen: dict[int, LearningResult] = {}
    own = [result for result in results if result.dataset == dataset and result.method == LORA.name]
    for result in sorted(own, key=lambda result: result.test_loss, reverse=True):
        chosen[result.seed] = result
    return chosen


def recovered_shares(results: Sequence[LearningResult], dataset: str, method: SageMethod) -> dict[int, float]:
    """(base - method) / (base - LoRA) in held-out loss, by seed; LoRA is the one with the same seed."""
    base = next((r.test_loss for r in results if r.dataset == dataset and r.method == BASE), None)
    lora = chosen_lora(results, dataset)
    if base is None:
        return {}
    return {
        result.seed: (base - result.test_loss) / (base - lora[result.seed].test_loss)
        for result in _runs(results, dataset, method)
        if result.seed in lora
    }


def learning_table(results: Sequence[LearningResult], dataset: str) -> str:
    """Held-out loss and the share of LoRA's improvement that each method recovered, over the seeds."""
    base = next((r for r in results if r.dataset == dataset and r.method == BASE), None)
    if base is None:
        return NOT_MEASURED
    rows = [["base model", f"{base.test_loss:.4f}", "", "", "", "", ""]]
    for method in expand(LEARNING_NAMES, sorted(BUDGETS, reverse=True)):
        own = _runs(results, dataset, method)
        seeds = SEEDS[:1] if method == MESP else SEEDS
        shares = list(recovered_shares(results, dataset, method).values())
        missing = [str(seed) for seed in seeds if seed not in {result.seed for result in own}]
        rows.append(
            [
                method.title,
                _mean([result.test_loss for result in own], 4),
                _mean(shares, 3),
                f"{min(shares):.3f} to {max(shares):.3f}" if len(shares) > 1 else "-",
                _mean([r.step_cpu_seconds for r in own if r.step_cpu_seconds is not None], 2),
                _mean([r.peak_bytes / 2**20 for r in own if r.peak_bytes is not None], 0),
                f"seed {', '.join(missing)}" if missing else "",
            ]
        )
    header = ["method", "test loss", "share of LoRA's improvement", "over the seeds", "CPU seconds a step", "peak, MiB"]
    return table([*header, "missing"], rows)


def _runs(results: Iterable[LearningResult], dataset: str, method: SageMethod) -> list[LearningResult]:
    """A method's runs, one per seed."""
    if method == LORA:
        return sorted(chosen_lora(results, dataset).values(), key=lambda result: result.seed)
    wanted = dataset, method.name, method.token_budget
    return [result for result in results if (result.dataset, result.method, result.token_budget) == wanted]


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "-"
