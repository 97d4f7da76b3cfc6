"""The runs that a card tells of: the adapter's own, and those it is compared with, one JSON file each in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memeff.recipes.card_fields import CardError
from hf_memeff.recipes.results import RESULTS_NAME, RunResult, read_result
from hf_memeff.tuners.config import config_classes
from hf_memeff.tuners.options import shorten

_WITHOUT_EFFECT_ON_RESULTS = ("gradient_checkpointing", "gradient_checkpointing_kwargs")
"""Training arguments that change memory and time alone; a LoRA run may need them where ours does not."""

LOWER_IS_BETTER = ("loss", "perplexity")
HIGHER_IS_BETTER = ("accuracy", "accuracies", "exact_match", "final_number", "margins")


@dataclass(frozen=True)
class CardRuns:
    """An adapter's run and its references.

    Attributes:
        own: the run that trained the adapter.
        references: by name of their file in the adapter's folder, other methods or settings of the same task.
    """

    own: RunResult
    references: dict[str, RunResult]

    @property
    def lora(self) -> RunResult | None:
        """The plain LoRA run among the references."""
        return next((run for run in self.references.values() if run.method == "lora"), None)


def read_runs(folder: Path, others: Sequence[Path]) -> CardRuns:
    """Read an adapter's run and its references, and refuse references that say nothing about it.

    Args:
        folder: the adapter's folder, with its `results.json` and, from an earlier card, ``results.*.json``.
        others: folders or results files of runs to compare with, such as plain LoRA's.

    Returns:
        The runs; each reference under the name that its copy in ``folder`` has or gets.

    Raises:
        ResultsError: a file is missing or of another form.
        CardError: a reference differs from the adapter's run in more than the method and its options.
    """
    own = read_result(folder)
    references = {path.name: read_result(path) for path in sorted(folder.glob("results.*.json"))}
    for other in others:
        run = read_result(other)
        if run != own and run not in references.values():
            references[_free_name(run.method, references)] = run
    for run in references.values():
        _check_comparable(own, run)
    return CardRuns(own, references)


def label(run: RunResult) -> str:
    """The method of a run with the settings that tell its variants apart."""
    if run.method not in config_classes():
        return "LoRA"
    title = config_classes()[run.method].title
    if "token_budget" not in run.settings:
        return title
    return f"{title} ({run.settings.get('saliency', 'attention')}, budget {run.settings['token_budget']})"


def is_worse(metric: str, value: float, reference: float) -> bool | None:
    """Whether a metric's value is worse than another; None for a metric that has no known better side."""
    name = metric.rsplit("/", 1)[-1]
    if name.endswith(LOWER_IS_BETTER):
        return value > reference
    return value < reference if name.endswith(HIGHER_IS_BETTER) else None


def _free_name(method: str, taken: dict[str, RunResult]) -> str:
    name, count = f"results.{method}.json", 1
    while name in taken or name == RESULTS_NAME:
        count += 1
        name = f"results.{method}.{count}.json"
    return name


def _check_comparable(own: RunResult, other: RunResult) -> None:
    mine, theirs = _task(own), _task(other)
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise CardError(
                f"Got a reference run, {label(other)}, with {name}={shorten(theirs.get(name))}, expected "
                f"{shorten(mine.get(name))} as in the adapter's run, so that the method alone differs. Fix: run "
                "hf-memeff finetune for it with the same settings."
            )


def _task(run: RunResult) -> dict[str, Any]:
    """What has to be equal in runs that are compared."""
    rules = [cls.option_rules() for cls in config_classes().values()]
    options = {name for one in rules for name in one}
    return {
        "trainer": run.trainer,
        "base_model": run.base_model,
        "base_revision": run.base_revision,
        "dataset": run.dataset,
        "seed": run.seed,
        "steps": run.train.steps,
        **{name: value for name, value in run.settings.items() if name not in options},
        **{k: value for k, value in run.training_arguments.items() if k not in _WITHOUT_EFFECT_ON_RESULTS},
    }
