"""Pictures of AnchorAttention's results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.anchor_op import SETTINGS
from hf_memeff.benchmarks.anchor_results import HeatResult, OpResult, PeerResult
from hf_memeff.benchmarks.anchor_rules import TITLES
from hf_memeff.benchmarks.anchor_tables import SETTING_TITLES, at_length, complete_layers, op_speed
from hf_memeff.benchmarks.plot import can_plot, svg_figure

_COLOURS = ("#d62728", "#ff7f0e", "#888888", "#1f77b4", "#2ca02c", "#9467bd")
_STYLE: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1}


def plot_speed(results: Sequence[OpResult], path: Path) -> bool:
    """Draw speed against sdpa and the share of candidates attended, against length.

    Args:
        results: of any layers and lengths.
        path: SVG file; its folder exists. The same results give the same bytes.

    Returns:
        False if nothing was drawn: matplotlib is not installed, or nothing is timed.
    """
    lines = {name: at_length(results, name) for name in SETTINGS}
    timed = {
        name: [(tokens, speed) for tokens, own in line.items() if (speed := op_speed(own)) is not None]
        for name, line in lines.items()
    }
    if not any(timed.values()) or not can_plot():
        return False
    first = results[0]
    title = f"{first.model}, {first.environment.gpu or 'CPU'}, mean over the measured layers"
    with svg_figure(path, title) as figure:
        speed, density = figure.subplots(1, 2)
        for name, colour in zip(SETTINGS, _COLOURS, strict=False):
            if timed[name]:
                speed.plot(*zip(*timed[name], strict=True), color=colour, label=SETTING_TITLES[name], **_STYLE)
                points = [(tokens, statistics.fmean(r.density for r in own)) for tokens, own in lines[name].items()]
                density.plot(*zip(*points, strict=True), color=colour, **_STYLE)
        speed.axhline(1.0, color="#888888", linewidth=1, linestyle="--", label="sdpa")
        speed.set(ylabel="sdpa's time by AnchorAttention's", ylim=(0, None))
        density.set(ylabel="attended share of the candidate keys", ylim=(0, None))
        lengths = sorted({result.tokens for result in results})
        for axes in (speed, density):
            axes.set(xscale="log", xlabel="tokens")
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        handles, labels = speed.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return True


def plot_density(results: Sequence[PeerResult], path: Path) -> bool:
    """Draw each rule's density against its recall, means over the layers that all rules were measured in.

    Args:
        results: of one length.
        path: as in `plot_speed`.

    Returns:
        False if nothing was drawn: matplotlib is not installed, or no layer is complete.
    """
    layers = complete_layers(results)
    if not layers or not can_plot():
        return False
    first = results[0]
    title = f"{first.model}, {first.tokens} tokens, layers {', '.join(map(str, layers))}, equal recall in each layer"
    with svg_figure(path, title) as figure:
        axes = figure.subplots(1, 1)
        for (method, label), colour in zip(TITLES.items(), _COLOURS, strict=True):
            own = [r for r in results if r.method == method and r.layer in layers]
            recall = [statistics.fmean(values) for values in zip(*(r.recalls for r in own), strict=True)]
            density = [statistics.fmean(values) for values in zip(*(r.densities for r in own), strict=True)]
            axes.plot(recall, density, color=colour, label=label, **_STYLE)
        axes.set(xlabel="recall, mean over rows, heads and layers", ylabel="attended share of causal pairs")
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return True


def plot_heat(result: HeatResult, path: Path) -> bool:
    """Draw one head's attention and what it attends to.

    Args:
        result: of one head.
        path: as in `plot_speed`.

    Returns:
        False if nothing was drawn: matplotlib is not installed.
    """
    if not can_plot():
        return False
    title = f"{result.model}, layer {result.layer}, head {result.head}, {result.tokens} tokens"
    with svg_figure(path, title) as figure:
        maps = (result.mass, "attention mass, log10", "viridis"), (result.kept, "attended share of the keys", "Reds")
        for axes, (values, label, colours) in zip(figure.subplots(1, 2), maps, strict=True):
            image = axes.imshow(
                _lower_triangle(values, result.cells),
                cmap=colours,
                extent=(0, result.tokens, result.tokens, 0),
                interpolation="nearest",
            )
            figure.colorbar(image, ax=axes, label=label, shrink=0.85)
            axes.set(xlabel="key", ylabel="query")
    return True


def _lower_triangle(values: Sequence[float], side: int) -> list[list[float]]:
    """Rows of a square map, with what is above the diagonal left blank."""
    blank = float("nan")
    return [[values[row * side + key] if key <= row else blank for key in range(side)] for row in range(side)]
