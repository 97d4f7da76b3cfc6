"""SAGE's results as Markdown; what is planned and not measured is named."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from hf_memeff.benchmarks.comparison import paired_ratio
from hf_memeff.benchmarks.sage_cosine import RANDOM, TRAINED, planned_cosines
from hf_memeff.benchmarks.sage_learning import BASE
from hf_memeff.benchmarks.sage_methods import BUDGETS, LORA, MESP, SALIENCIES, SageMethod, expand
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult
from hf_memeff.benchmarks.sage_runs import LEARNING_NAMES, SEEDS, best_rate
from hf_memeff.benchmarks.sage_steps import CHECKPOINTING, planned_steps
from hf_memeff.benchmarks.tables import NOT_MEASURED, table

HEADLINE_BUDGET = 0.25
_DESCENDING = sorted(BUDGETS, reverse=True)


def tried_rates(results: Iterable[LearningResult], dataset: str) -> dict[float, LearningResult]:
    """LoRA's runs on its first seed by their learning rate, ascending."""
    own = [result for result in results if result.dataset == dataset and result.method == LORA.name]
    first = min((result.seed for result in own), default=0)
    tried = {result.learning_rate: result for result in own if result.seed == first}
    return dict(sorted(tried.items()))


def main_rate(results: Sequence[LearningResult], dataset: str) -> float | None:
    """LoRA's best rate of those tried, which every method runs with; None without LoRA."""
    tried = tried_rates(results, dataset)
    return best_rate(results, dataset, list(tried)) if tried else None


def runs_of(
    results: Sequence[LearningResult], dataset: str, method: SageMethod, rate: float | None = None
) -> list[LearningResult]:
    """A method's runs with a learning rate, by default LoRA's best, in order of their seeds."""
    wanted = dataset, method.name, method.token_budget, main_rate(results, dataset) if rate is None else rate
    own = [r for r in results if (r.dataset, r.method, r.token_budget, r.learning_rate) == wanted]
    return sorted(own, key=lambda result: result.seed)


def recovered_shares(
    results: Sequence[LearningResult], dataset: str, method: SageMethod, rate: float | None = None
) -> dict[int, float]:
    """(base - method) / (base - LoRA) in held-out loss, by seed; LoRA is the one with the same seed and rate."""
    base = next((r.test_loss for r in results if r.dataset == dataset and r.method == BASE), None)
    lora = {result.seed: result.test_loss for result in runs_of(results, dataset, LORA, rate)}
    if base is None:
        return {}
    return {
        result.seed: (base - result.test_loss) / (base - lora[result.seed])
        for result in runs_of(results, dataset, method, rate)
        if result.seed in lora
    }


def learning_table(results: Sequence[LearningResult], dataset: str) -> str:
    """Held-out loss and the share of LoRA's improvement that each method recovered, over the seeds."""
    base = next((r for r in results if r.dataset == dataset and r.method == BASE), None)
    if base is None:
        return NOT_MEASURED
    rows = [["base model", f"{base.test_loss:.4f}", *["-"] * 4, ""]]
    for method in expand(LEARNING_NAMES, _DESCENDING):
        own = runs_of(results, dataset, method)
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
                _mean([r.peak_bytes / 2**20 for r in own if r.peak_bytes is not None], 1),
                f"seed {', '.join(missing)}" if missing else "",
            ]
        )
    header = ["method", "test loss", "share of LoRA's improvement", "over the seeds", "CPU seconds a step", "peak, MiB"]
    return table([*header, "missing"], rows)


def learning_note(results: Sequence[LearningResult], dataset: str) -> str:
    """How the runs were done, and the learning rates that LoRA was tried with."""
    base = next((r for r in results if r.dataset == dataset and r.method == BASE), None)
    tried = tried_rates(results, dataset)
    if base is None or not tried:
        return NOT_MEASURED
    run = next(iter(tried.values()))
    rates = ", ".join(f"{rate:g} ({result.test_loss:.4f})" for rate, result in tried.items())
    return (
        f"{run.model}, rank {run.rank} on every linear layer, fp32, {run.steps} steps of {run.rows_per_step} rows of "
        f"at most {run.longest_row} tokens, questions as a {run.prompt}, loss over {base.test_tokens} answer tokens of "
        f"{base.test_rows} held-out rows; LoRA's learning rates and their test loss with seed {run.seed}: {rates}; "
        "the best of them for every method"
    )


def other_rates_table(results: Sequence[LearningResult], dataset: str) -> str:
    """What methods learnt with the rates that are not LoRA's best; those without a run are left out."""
    rows = []
    for rate in tried_rates(results, dataset):
        for method in expand(LEARNING_NAMES, _DESCENDING):
            own = runs_of(results, dataset, method, rate)
            if rate == main_rate(results, dataset) or method == LORA or not own:
                continue
            shares = list(recovered_shares(results, dataset, method, rate).values())
            losses = [[r.test_loss for r in runs] for runs in (own, runs_of(results, dataset, LORA, rate))]
            seeds = ", ".join(str(result.seed) for result in own)
            rows.append([f"{rate:g}", method.title, seeds, *(_mean(each, 4) for each in losses), _mean(shares, 3)])
    header = ["learning rate", "method", "seeds", "test loss", "LoRA's test loss", "share of LoRA's improvement"]
    return table(header, rows) if rows else NOT_MEASURED


def method_rows(steps: Sequence[StepResult], cosines: Sequence[CosineResult]) -> list[list[str]]:
    """SAGE's row for the table of methods, at a budget of 0.25; none without a measured step."""
    method = SageMethod("sage-attention", HEADLINE_BUDGET)
    own, mesp, checkpointing = (find_step(steps, other) for other in (method, MESP, CHECKPOINTING))
    if own is None or own.peak_bytes is None:
        return []
    setting = f"({own.model}, {own.rows} x {own.tokens} tokens)"
    shares = [
        f"{own.peak_bytes / other.peak_bytes:.0%} of {reference.title}".replace("%", " %")
        for other, reference in ((checkpointing, CHECKPOINTING), (mesp, MESP))
        if other is not None and other.peak_bytes
    ]
    times = [
        f"{ratio:.2f} of {reference.title}"
        for reference in (CHECKPOINTING, LORA)
        if (ratio := time_ratio(own, reference)) is not None
    ]
    found = find_cosine(cosines, RANDOM, method)
    cosine = "" if found is None else f"; cosine to LoRA's {statistics.fmean(found.cosines):.2f}"
    return [
        [
            f"SAGE (`SageConfig`, budget {HEADLINE_BUDGET:g})",
            f"approximate{cosine}",
            f"{', '.join(shares)} {setting}",
            f"{', '.join(times)} {setting}" if times else NOT_MEASURED,
            "plain LoRA",
        ]
    ]


def find_step(results: Iterable[StepResult], method: SageMethod) -> StepResult | None:
    """A method's step."""
    wanted = method.name, method.token_budget
    return next((result for result in results if (result.method, result.token_budget) == wanted), None)


def time_ratio(result: StepResult, reference: SageMethod) -> float | None:
    """Median over the rounds of a step's time by LoRA's, or checkpointing's, in the same round; None if not timed.

    With one thread it is the CPU time, which is the wall time of an idle core whatever else the machine does.
    """
    if not result.step_seconds:
        return None
    if result.environment.threads == 1:
        of_lora, of_checkpointing = result.lora_cpu_seconds, result.checkpointing_cpu_seconds
        own = result.step_cpu_seconds
    else:
        own, of_lora, of_checkpointing = result.step_seconds, result.lora_seconds, result.checkpointing_seconds
    return paired_ratio(own, of_lora if reference == LORA else of_checkpointing)


def steps_table(results: Sequence[StepResult]) -> str:
    """Peak memory, cached bytes and step time of every method."""
    if not results:
        return NOT_MEASURED
    rows = []
    for method in planned_steps(_DESCENDING):
        own = find_step(results, method)
        cells = ["-"] * 4
        if own is not None:
            cells = [
                "-" if own.peak_bytes is None else f"{own.peak_bytes / 2**20:,.1f}",
                "-" if own.cached_bytes is None else f"{own.cached_bytes / 2**20:,.1f}",
                *(_digits(time_ratio(own, reference)) for reference in (LORA, CHECKPOINTING)),
            ]
        rows.append([method.title, *cells, NOT_MEASURED if own is None else ""])
    header = ["method", "peak, MiB", "cached, MiB", "step time, LoRA = 1", "step time, LoRA + checkpointing = 1"]
    return table([*header, "missing"], rows)


def find_cosine(results: Iterable[CosineResult], adapter: str, method: SageMethod) -> CosineResult | None:
    """A method's cosines on one adapter."""
    wanted = adapter, method.saliency, method.token_budget, method.dense_layers, method.backward_keys
    return next(
        (r for r in results if (r.adapter, r.saliency, r.token_budget, r.dense_layers, r.backward_keys) == wanted),
        None,
    )


def cosine_table(results: Sequence[CosineResult]) -> str:
    """Mean and minimum over the batches, by saliency and budget; last block dense, the saliency's own keys."""
    if not results:
        return NOT_MEASURED
    rows = []
    for saliency in SALIENCIES:
        methods = [SageMethod(f"sage-{saliency}", budget) for budget in _DESCENDING]
        cells = [
            "-" if (own := find_cosine(results, adapter, method)) is None else _mean_and_min(own.cosines)
            for adapter in (RANDOM, TRAINED)
            for method in methods
        ]
        rows.append([saliency.replace("_", " "), *cells])
    header = [f"{budget:g}, {words}" for words in ("random B", "trained") for budget in _DESCENDING]
    return table(["saliency", *header], rows)


def cosine_variants_table(results: Sequence[CosineResult]) -> str:
    """Cosines at a budget of 0.25, whole and by block, for every choice of dense layers and keys."""
    if not results:
        return NOT_MEASURED
    rows = []
    for saliency in SALIENCIES:
        for method in planned_cosines((HEADLINE_BUDGET,), (saliency,)):
            cells: list[str] = []
            for adapter in (RANDOM, TRAINED):
                own = find_cosine(results, adapter, method)
                cells += (
                    ["-"] * 2
                    if own is None
                    else [
                        _mean_and_min(own.cosines),
                        f"{statistics.median(own.layer_cosines):.2f} ({min(own.layer_cosines):.2f})",
                    ]
                )
            dense = "last" if method.dense_layers else "none"
            rows.append([saliency.replace("_", " "), dense, method.backward_keys, *cells])
    header = [
        f"{what}, {words}"
        for words in ("random B", "trained")
        for what in ("mean (min) of batches", "median (min) of layers")
    ]
    return table(["saliency", "dense block", "keys", *header], rows)


def _mean_and_min(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({min(values):.2f})"


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "-"


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
