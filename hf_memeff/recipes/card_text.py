"""The tables and sentences of a model card, from the runs that it tells of. Every number comes out of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hf_memeff.recipes.card_fields import CardFields
from hf_memeff.recipes.card_runs import CardRuns, is_worse, label
from hf_memeff.recipes.results import RESULTS_NAME, RunResult

_MIB = 2**20


def number(value: float | None) -> str:
    """Four significant digits, or a dash for what was not measured."""
    return "-" if value is None else f"{value:.4g}"


def training_table(run: RunResult, fields: CardFields) -> str:
    """What was trained, on what, and for how long."""
    data, train = run.dataset, run.train
    rows = [
        ("base model", fields.base_model),
        ("its revision", fields.base_revision or "not recorded"),
        ("method", f"{label(run)}, {'exact' if fields.exact else 'approximate'} gradients"),
        ("trainer", run.trainer.upper()),
        ("data", " ".join(filter(None, (data.name, data.config)))),
        ("trained on", f"{data.train_rows} rows of {data.train_split}"),
        ("judged on", f"{data.test_rows} rows of {data.test_split}" if data.test_split else "nothing"),
        ("optimizer steps", train.steps),
        ("passes over the data", number(train.epochs)),
        ("seed", run.seed),
        ("training loss", _loss(run)),
    ]
    if train.resumed_at is not None:
        rows.append(("resumed at step", train.resumed_at))
    return table(("", ""), rows)


def settings_table(run: RunResult) -> str:
    """Fields of the adapter's config and of the trainer's arguments, as the run recorded them."""
    rows = [("adapter", name, _code(value)) for name, value in sorted(run.settings.items())]
    rows += [("trainer", name, _code(value)) for name, value in sorted(run.training_arguments.items())]
    return table(("of the", "setting", "value"), rows)


def measures_table(runs: CardRuns) -> str:
    """Memory and time of the adapter's run and of the references that the same machine and versions measured."""
    shown = [runs.own, *(run for run in runs.references.values() if run.environment.comparable(runs.own.environment))]
    rows = [
        ("peak memory of a step, MiB", *(number(_mib(run)) for run in shown)),
        ("time per step, s", *(number(run.seconds_per_step) for run in shown)),
    ]
    return table(("", *_headings(runs.own, shown)), rows)


def measured_elsewhere(runs: CardRuns) -> str:
    """The references that `measures_table` leaves out, by name."""
    own = runs.own.environment
    return " and ".join(label(run) for run in runs.references.values() if not run.environment.comparable(own))


def measured_on(run: RunResult) -> str:
    """Hardware, versions, day and commit."""
    environment = run.environment
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    commit = f", commit {environment.commit}" if environment.commit else ""
    return f"{environment.hardware()}; {versions}; {environment.date}{commit}"


def evaluation_table(runs: CardRuns) -> str:
    """Each metric for the base model, the adapter and the references."""
    if not runs.own.evaluation:
        return "The adapter was not evaluated."
    shown = [runs.own, *runs.references.values()]
    rows = []
    for name, values in runs.own.evaluation.items():
        scores = (run.evaluation[name].adapter if name in run.evaluation else None for run in shown)
        rows.append((name, number(values.base), *map(number, scores)))
    return table(("", "base model", *_headings(runs.own, shown)), rows)


def comparison_sentence(runs: CardRuns) -> str:
    """What the adapter is compared with, or that it is not."""
    if runs.lora is None:
        return "It was not compared with a plain LoRA run of the same settings."
    return (
        "All runs in the table had the same base model, data, seed, number of steps, rank and training arguments; the\n"
        "method and its options alone differ."
    )


def limits_list(runs: CardRuns, fields: CardFields) -> str:
    """What the adapter can't be expected to do, what went worse than LoRA, and what was not looked at."""
    run = runs.own
    lines = [
        f"Trained on {run.dataset.train_rows} rows of one data set for {run.train.steps} steps. Nothing else is known "
        "of its quality, and what the base model gets wrong it may get wrong too."
    ]
    if fields.base_revision is not None and fields.commit is None:
        lines.append(
            f"Trained on the base weights of {fields.base_revision}. Other copies of the model, the Hub's among them, "
            "may give other results, for example where these are quantised."
        )
    if not run.evaluation:
        lines.append("There is no evaluation, so nothing here says that the training helped.")
    for name, values in run.evaluation.items():
        if is_worse(name, values.adapter, values.base):
            lines.append(f"{name} is worse than the base model's: {number(values.adapter)}, {number(values.base)}.")
    if not fields.exact:
        lines.append(
            "An approximate gradient can learn worse than LoRA's on other data, models or learning rates. Then raise "
            "`token_budget`, or use `MespConfig`, whose gradients are exact; `GradientProbeCallback` logs the cosine "
            "to the exact gradient."
        )
    lines += _against_lora(runs)
    return "\n".join(f"- {line}" for line in lines)


def sources(runs: CardRuns) -> str:
    """The files that the numbers come from."""
    return ", ".join(f"`{name}`" for name in (RESULTS_NAME, *runs.references))


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; a bar inside of a cell does not end it."""
    lines = [list(headings), ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _against_lora(runs: CardRuns) -> list[str]:
    """A line for each run and metric that came out worse than plain LoRA's."""
    if runs.lora is None:
        return ["How it compares with plain LoRA on this data was not measured."]
    lines = []
    for run in (runs.own, *(other for other in runs.references.values() if other.method != "lora")):
        for name, values in run.evaluation.items():
            reference = runs.lora.evaluation.get(name)
            if reference is not None and is_worse(name, values.adapter, reference.adapter):
                lines.append(
                    f"{label(run)} came out worse than LoRA in {name}: {number(values.adapter)}, LoRA "
                    f"{number(reference.adapter)}."
                )
    return lines


def _headings(own: RunResult, shown: Sequence[RunResult]) -> list[str]:
    return [f"this adapter, {label(run)}" if run is own else label(run) for run in shown]


def _loss(run: RunResult) -> str:
    curve = run.train.loss_curve
    if not curve:
        return "not logged"
    return f"{number(curve[0].loss)} at step {curve[0].step}, {number(curve[-1].loss)} at step {curve[-1].step}"


def _mib(run: RunResult) -> float | None:
    return None if run.peak_bytes is None else run.peak_bytes / _MIB


def _code(value: Any) -> str:
    return f"`{value}`"
