"""The picture of a run: training loss against steps."""

from __future__ import annotations

from pathlib import Path

from hf_memeff.benchmarks.plot import can_plot, svg_figure
from hf_memeff.recipes.results import RunResult


def plot_learning_curve(result: RunResult, path: Path) -> bool:
    """Draw a run's training loss, and its test loss before and after.

    Args:
        result: the run.
        path: SVG file; its folder exists. The same result gives the same bytes.

    Returns:
        False if nothing was drawn: matplotlib is not installed, or no loss was logged.
    """
    curve = result.train.loss_curve
    if not curve or not can_plot():
        return False
    with svg_figure(path, f"{result.base_model}, {result.trainer}, {result.method}") as figure:
        axes = figure.subplots()
        axes.plot([p.step for p in curve], [p.loss for p in curve], marker="o", markersize=3, label="training loss")
        held_out = result.evaluation.get("eval_loss")
        if held_out is not None:
            ends, values = (0, result.train.steps), (held_out.base, held_out.adapter)
            axes.plot(ends, values, "s", color="#d62728", label="test loss, before and after")
        axes.set(xlabel="optimizer steps", ylabel="loss")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return True
