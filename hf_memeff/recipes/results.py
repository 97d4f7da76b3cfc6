"""`results.json`: what one fine-tuning run was, and what came out of it.

Every run of `hf-memeff finetune` leaves this file beside its adapter; the model card is rendered from it. It holds no
path of the machine that it was made on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.results import Environment, ResultsError
from hf_memeff.recipes.demo.options import write_json

RESULTS_NAME = "results.json"
_FORMAT = 1


@dataclass(frozen=True)
class DataRecord:
    """What was trained and judged on.

    Attributes:
        name: Hub id, name of a local file or folder without its path, or "hf_memeff order tickets" for the shipped set.
        config: configuration of a Hub data set; None where there is none.
        train_split: split that was trained on.
        train_rows: rows of it that were used.
        test_split: split that was judged on; None without evaluation.
        test_rows: rows of it that were used.
    """

    name: str
    config: str | None
    train_split: str
    train_rows: int
    test_split: str | None
    test_rows: int


@dataclass(frozen=True)
class LossPoint:
    """One logged training loss: the mean since the point before it.

    Attributes:
        step: optimizer steps done by then.
        loss: as the trainer logs it.
    """

    step: int
    loss: float


@dataclass(frozen=True)
class TrainRecord:
    """How the training went.

    Attributes:
        steps: optimizer steps, those before a resumed checkpoint included.
        epochs: passes over the data, in fractions.
        loss_curve: logged losses in order of steps.
        seconds: wall time of the training in this process; what ran before a resumed checkpoint is not in it.
        resumed_at: step that it was resumed at; None for a run in one piece.
    """

    steps: int
    epochs: float
    loss_curve: tuple[LossPoint, ...]
    seconds: float
    resumed_at: int | None


@dataclass(frozen=True)
class MetricValues:
    """One metric, before and after the training.

    Attributes:
        base: value of the base model.
        adapter: value with the trained adapter.
    """

    base: float
    adapter: float


@dataclass(frozen=True)
class RunResult:
    """One fine-tuning run.

    Attributes:
        trainer: "sft" or "dpo".
        base_model: Hub id; for a model from a local folder or file its name without a slash.
        base_revision: commit on the Hub, or the release of the package that carried the weights; None for a local
            model.
        method: "lora", "mesp" or "sage".
        exact: whether the method's gradients are LoRA's.
        settings: fields of the adapter's config that differ from their defaults, and all fields of this package.
        training_arguments: fields of `SFTConfig` or `DPOConfig` that differ from their defaults, paths left out.
        dataset: what was trained and judged on.
        train: how the training went.
        evaluation: by metric: those of the trainer by its own names ("eval_loss", ...), then those asked for
            ("exact_match", ...). Empty without a test split.
        peak_bytes: most bytes allocated at once in a training step, above what was allocated when it began, over the
            measured steps (optimizer included); None where the device has no meter.
        measured_steps: the steps that ``peak_bytes`` is the maximum of.
        seconds_per_step: median wall time of the steps whose memory was not measured; None if there are none.
        environment: machine and versions.
        seed: of the adapter's initial values, the order of the rows and the random choices of training.
        license: of the adapter, for its model card; None if none was named.
        language: of the data, likewise.
    """

    trainer: str
    base_model: str
    base_revision: str | None
    method: str
    exact: bool
    settings: dict[str, Any]
    training_arguments: dict[str, Any]
    dataset: DataRecord
    train: TrainRecord
    evaluation: dict[str, MetricValues]
    peak_bytes: int | None
    measured_steps: tuple[int, ...]
    seconds_per_step: float | None
    environment: Environment
    seed: int
    license: str | None = None
    language: str | None = None


def write_result(result: RunResult, path: Path) -> None:
    """Write a run as JSON; the file is whole at any time.

    Args:
        result: the run.
        path: the file; its folder exists.
    """
    write_json({"format": _FORMAT, **asdict(result)}, path)


def read_result(path: Path) -> RunResult:
    """Read what `write_result` wrote.

    Args:
        path: the file, or the folder that has it as `RESULTS_NAME`.

    Raises:
        ResultsError: the file is missing, or not of this form.
    """
    path = path / RESULTS_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unusable(path, f"no file to read ({error.strerror})") from error
    except ValueError as error:
        raise _unusable(path, f"no JSON ({error})") from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise _unusable(path, f"no run of format {_FORMAT}")
    try:
        train = content["train"]
        curve = tuple(LossPoint(**point) for point in train["loss_curve"])
        built = {
            "dataset": DataRecord(**content["dataset"]),
            "train": TrainRecord(**{**train, "loss_curve": curve}),
            "evaluation": {name: MetricValues(**values) for name, values in content["evaluation"].items()},
            "measured_steps": tuple(content["measured_steps"]),
            "environment": Environment(**content["environment"]),
        }
        return RunResult(**{**content, **built})
    except (TypeError, KeyError, AttributeError) as error:
        raise _unusable(path, f"fields that are no run's ({type(error).__name__}: {error})") from error


def _unusable(path: Path, found: str) -> ResultsError:
    return ResultsError(
        f"Got {path} with {found}, expected the results of `hf-memeff finetune`. Fix: run it again, or name the folder "
        "that it wrote."
    )
