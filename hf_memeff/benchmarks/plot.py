"""The picture of a comparison: peak memory and step time against sequence length."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.methods import METHODS
from hf_memeff.benchmarks.results import MethodResult
from hf_memeff.benchmarks.tables import length_sweep, steady_ratio

_COLOURS = {"lora": "#888888", "lora-checkpointing": "#1f77b4", "lora-reentrant": "#9467bd", "mesp": "#d62728"}


def plot_results(results: Sequence[MethodResult], path: Path) -> bool:
    """Draw the sweep over length that has the most lengths.

    Args:
        results: of any cases.
        path: SVG file; its folder exists. The same results give the same bytes.

    Returns:
        False if nothing was drawn: matplotlib is not installed, or there is no sweep.
    """
    sweep = length_sweep(results)
    if not sweep or not can_plot():
        return False
    first = sweep[0]
    title = f"{first.model}, {first.dtype}, rank {first.rank}, {first.environment.gpu or 'CPU'}"
    with svg_figure(path, title) as figure:
        memory, time = figure.subplots(1, 2)
        for name in METHODS:
            own = [result for result in sweep if result.method == name]
            peaks = [(r.tokens, r.peak_bytes / 2**20) for r in own if r.peak_bytes is not None]
            ratios = [(r.tokens, ratio) for r in own if (ratio := steady_ratio(r)) is not None]
            if own:
                _line(memory, peaks, name)
                _line(time, ratios, name)
        memory.set(xscale="log", yscale="log", ylabel="peak above weights and gradients, MiB")
        time.set(xscale="log", ylabel="step time, LoRA + checkpointing = 1", ylim=(0, None))
        memory.yaxis.set_major_formatter("{x:g}")
        for axes in (memory, time):
            lengths = sorted({result.tokens for result in sweep})
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
            axes.set_xlabel("tokens")
            axes.grid(alpha=0.3)
        handles, labels = memory.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return True


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def svg_figure(path: Path, title: str) -> Iterator[Any]:
    """A figure in this project's style, written when the block ends; what is drawn alike has the same bytes.

    Args:
        path: SVG file; its folder exists.
        title: of the figure.

    Yields:
        The `matplotlib.figure.Figure`.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "hf_memeff", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        yield figure
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _line(axes: Any, points: Sequence[tuple[int, float]], name: str) -> None:
    """One method's curve: colour by the way of training, dashed with a tiled loss or another store."""
    points = sorted(points)
    family = next(key for key in sorted(_COLOURS, key=len, reverse=True) if name.startswith(key))
    style = "-" if name == family else "--"
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axes.plot(xs, ys, style, marker="o", markersize=3.5, color=_COLOURS[family], label=METHODS[name].title)
