"""A sweep's runs, put together: mean and standard deviation over the seeds, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_memeff.benchmarks.sage_methods import LORA, SageMethod
from hf_memeff.benchmarks.tables import table
from hf_memeff.recipes.demo.options import write_json
from hf_memeff.recipes.results import RunResult

LOSS = "eval_loss"
_FORMAT = 1


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        setting: name of the setting.
        method: how it trained.
        result: what came out.
    """

    setting: str
    method: SageMethod
    result: RunResult


@dataclass(frozen=True)
class Spread:
    """A value over the seeds.

    Attributes:
        mean: arithmetic mean.
        std: standard deviation of a sample; None of one seed.
    """

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.std is None else f"{self.mean:.4g} ± {self.std:.2g}"


@dataclass(frozen=True)
class SweepRow:
    """One method in one setting, over the seeds.

    Attributes:
        setting: name of the setting.
        method: name of the method.
        title: name and budget, in words.
        token_budget: SAGE's; None for the others.
        exact: whether the gradients are LoRA's.
        seeds: what it ran with.
        base: the base model's values by metric.
        metrics: values with the trained adapter by metric.
        gain_share: how much of LoRA's improvement in test loss it reaches with the same seed, (base - own) /
            (base - LoRA); None without LoRA's run, or where LoRA did not improve.
        peak_bytes: of a training step, see `RunResult`; None where the device has no meter.
        seconds_per_step: wall time; None where every step was measured.
    """

    setting: str
    method: str
    title: str
    token_budget: float | None
    exact: bool
    seeds: tuple[int, ...]
    base: dict[str, float]
    metrics: dict[str, Spread]
    gain_share: Spread | None
    peak_bytes: Spread | None
    seconds_per_step: Spread | None


def sweep_rows(runs: Sequence[SweepRun]) -> list[SweepRow]:
    """One row per setting and method, in the order of the runs."""
    found = []
    for setting, method in dict.fromkeys((run.setting, run.method) for run in runs):
        own = [run.result for run in runs if (run.setting, run.method) == (setting, method)]
        lora = {r.result.seed: r.result for r in runs if (r.setting, r.method) == (setting, LORA)}
        found.append(
            SweepRow(
                setting=setting,
                method=method.name,
                title=method.title,
                token_budget=method.token_budget,
                exact=own[0].exact,
                seeds=tuple(result.seed for result in own),
                base={name: values.base for name, values in own[0].evaluation.items()},
                metrics={
                    name: _over([result.evaluation[name].adapter for result in own]) for name in own[0].evaluation
                },
                gain_share=_spread(_gain(result, lora.get(result.seed)) for result in own),
                peak_bytes=_spread(result.peak_bytes for result in own),
                seconds_per_step=_spread(result.seconds_per_step for result in own),
            )
        )
    return found


def write_sweep(runs: Sequence[SweepRun], path: Path) -> None:
    """Write rows and runs as JSON; the file is whole at any time.

    Args:
        runs: those that are done.
        path: the file; its folder exists.
    """
    single = [
        {"setting": run.setting, "title": run.method.title, "token_budget": run.method.token_budget}
        | asdict(run.result)
        for run in runs
    ]
    write_json({"format": _FORMAT, "rows": [asdict(row) for row in sweep_rows(runs)], "runs": single}, path)


def sweep_table(rows: Sequence[SweepRow], setting: str, metrics: Sequence[str]) -> str:
    """A setting as Markdown.

    Args:
        rows: from `sweep_rows`.
        setting: name of the setting.
        metrics: columns, by their names in the results.

    Returns:
        One line per method; first the base model's.
    """
    own = [row for row in rows if row.setting == setting]
    lines = [["base model", *(f"{own[0].base[name]:.4g}" for name in metrics), *["-"] * 3]]
    for row in own:
        peak = None if row.peak_bytes is None else _scaled(row.peak_bytes, 2**-20)
        cells = [*(row.metrics[name] for name in metrics), row.gain_share, peak, row.seconds_per_step]
        lines.append([row.title, *("-" if cell is None else str(cell) for cell in cells)])
    seeds = ", ".join(map(str, own[0].seeds))
    titles = [name.removeprefix("eval_").replace("_", " ") for name in metrics]
    header = [f"{setting}, seeds {seeds}", *titles, "share of LoRA's gain", "peak, MiB", "seconds a step"]
    return table(header, lines)


def least_gain(rows: Sequence[SweepRow]) -> SweepRow | None:
    """The row with the smallest share of LoRA's gain; None if none has one."""
    shares = [(row.gain_share.mean, row) for row in rows if row.gain_share is not None]
    return min(shares, key=lambda pair: pair[0])[1] if shares else None


def _gain(result: RunResult, lora: RunResult | None) -> float | None:
    if lora is None:
        return None
    loss, reference = result.evaluation[LOSS], lora.evaluation[LOSS]
    improvement = reference.base - reference.adapter
    return (loss.base - loss.adapter) / improvement if improvement > 0 else None


def _over(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _spread(values: Iterable[float | None]) -> Spread | None:
    found = [value for value in values if value is not None]
    return _over(found) if found else None


def _scaled(value: Spread, factor: float) -> Spread:
    return Spread(value.mean * factor, None if value.std is None else value.std * factor)
