"""Pictures of SAGE's results: what is learnt against time and memory, and the gradients' cosine against the budget."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.plot import can_plot, svg_figure
from hf_memeff.benchmarks.sage_cosine import RANDOM, TRAINED
from hf_memeff.benchmarks.sage_methods import BUDGETS, SALIENCIES, SageMethod, expand
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult
from hf_memeff.benchmarks.sage_runs import LEARNING_NAMES
from hf_memeff.benchmarks.sage_tables import find_cosine, recovered_shares, runs_of
from hf_memeff.benchmarks.sage_text import DATA_SETS

_COLOURS = {
    "lora": "#888888",
    "mesp": "#d62728",
    "sage-gradient": "#1f77b4",
    "sage-attention": "#2ca02c",
    "sage-value_norm": "#9467bd",
    "sage-random": "#ff7f0e",
}


def plot_learning(results: Sequence[LearningResult], dataset: str, path: Path) -> bool:
    """Draw the share of LoRA's improvement that each method recovered against CPU time and peak memory of a step.

    A point is a method's mean over its seeds, the bar their range; budgets of one saliency are joined.

    Args:
        results: of any data sets.
        dataset: key of `DATA_SETS`.
        path: SVG file; its folder exists. The same results give the same bytes.

    Returns:
        False if nothing was drawn: matplotlib is not installed, or there is no share.
    """
    points: dict[str, list[tuple[float, float, float, float, float]]] = {}
    for method in expand(LEARNING_NAMES, sorted(BUDGETS)):
        shares = list(recovered_shares(results, dataset, method).values())
        own = runs_of(results, dataset, method)
        seconds = [run.step_cpu_seconds for run in own if run.step_cpu_seconds is not None]
        peaks = [run.peak_bytes / 2**20 for run in own if run.peak_bytes is not None]
        if shares and seconds and peaks:
            middle = statistics.fmean(shares)
            spread = middle - min(shares), max(shares) - middle
            cost = statistics.fmean(seconds), statistics.fmean(peaks)
            points.setdefault(method.name, []).append((*cost, middle, *spread))
    if not points or not can_plot():
        return False
    first = next(result for result in results if result.dataset == dataset)
    with svg_figure(path, f"{DATA_SETS[dataset].title}, {first.model}, {_budget_words()}") as figure:
        time, memory = figure.subplots(1, 2, sharey=True)
        for name, own_points in points.items():
            columns = list(zip(*own_points, strict=True))
            for axes, xs in ((time, columns[0]), (memory, columns[1])):
                axes.errorbar(xs, columns[2], yerr=columns[3:], color=_COLOURS[name], label=_label(name), **_STYLE)
        time.set(xlabel="CPU seconds a step", ylabel="share of LoRA's improvement")
        memory.set(xlabel="peak above weights and gradients, MiB", xscale="log")
        _finish(figure, time, memory)
    return True


def plot_cosines(results: Sequence[CosineResult], path: Path) -> bool:
    """Draw the mean cosine against the budget, at random adapters and after training, and the range over the batches.

    Args:
        results: of any settings; those with the last block dense and each saliency's own keys are drawn.
        path: SVG file; its folder exists. The same results give the same bytes.

    Returns:
        False if nothing was drawn: matplotlib is not installed, or there is no such result.
    """
    found = {
        (adapter, saliency, budget): result.cosines
        for adapter in (RANDOM, TRAINED)
        for saliency in SALIENCIES
        for budget in sorted(BUDGETS)
        if (result := find_cosine(results, adapter, SageMethod(f"sage-{saliency}", budget))) is not None
    }
    if not found or not can_plot():
        return False
    adapters = [adapter for adapter in (RANDOM, TRAINED) if any(key[0] == adapter for key in found)]
    with svg_figure(path, f"{DATA_SETS[results[0].dataset].title}, {results[0].model}, last block dense") as figure:
        panels = figure.subplots(1, len(adapters), sharey=True, squeeze=False)[0]
        for axes, adapter in zip(panels, adapters, strict=True):
            for saliency in SALIENCIES:
                own = [(key[2], cosines) for key, cosines in found.items() if key[:2] == (adapter, saliency)]
                if own:
                    means = [statistics.fmean(cosines) for _, cosines in own]
                    low = [mean - min(cosines) for mean, (_, cosines) in zip(means, own, strict=True)]
                    high = [max(cosines) - mean for mean, (_, cosines) in zip(means, own, strict=True)]
                    name, budgets = f"sage-{saliency}", [budget for budget, _ in own]
                    axes.errorbar(budgets, means, yerr=(low, high), color=_COLOURS[name], label=_label(name), **_STYLE)
            axes.set(xlabel=f"token budget, {'random B' if adapter == RANDOM else 'after training'}")
            axes.set_xticks(sorted(BUDGETS), [f"{budget:g}" for budget in sorted(BUDGETS)])
        panels[0].set(ylabel="cosine to the exact gradient", ylim=(0, 1))
        _finish(figure, *panels)
    return True


_STYLE: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1}


def _finish(figure: Any, *panels: Any) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _label(name: str) -> str:
    if not name.startswith("sage-"):
        return SageMethod(name).title
    return f"SAGE, {name.removeprefix('sage-').replace('_', ' ')}"


def _budget_words() -> str:
    return f"token budgets {', '.join(f'{budget:g}' for budget in sorted(BUDGETS))}"
