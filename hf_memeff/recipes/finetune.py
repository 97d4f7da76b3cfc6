"""`hf-memeff finetune`: a config in; an adapter, its results and its learning curve out."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_memeff.benchmarks.results import Environment
from hf_memeff.recipes.answers import judge, require_answers
from hf_memeff.recipes.card_fields import check_card_fields
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.gguf_wheel import WHEEL
from hf_memeff.recipes.learning_curve import plot_learning_curve
from hf_memeff.recipes.model_source import ModelSource, find_smollm2, load_config, load_model, load_tokenizer
from hf_memeff.recipes.parsing import RunPlan, adapter_settings, parse_plan, resolved, training_settings
from hf_memeff.recipes.results import (
    RESULTS_NAME,
    LossPoint,
    MetricValues,
    RunResult,
    TrainRecord,
    write_result,
)
from hf_memeff.recipes.step_meters import FewStepsMemory, StepClock
from hf_memeff.recipes.trainers import build_trainer, first_batch
from hf_memeff.recipes.training_data import RunData, in_chat_form, load_data, with_lengths_checked

CURVE_NAME = "learning_curve.svg"
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


def finetune(
    config: Path, words: Sequence[str] = (), *, dry_run: bool = False, say: Callable[[str], object] = print
) -> RunResult | None:
    """Run a fine-tuning config.

    Args:
        config: YAML file, see `parse_plan`.
        words: command-line words that replace fields of it.
        dry_run: check everything, say the resolved config and the first batch, and stop before weights are loaded.
        say: called with each line for the user.

    Returns:
        What `RESULTS_NAME` in the output folder holds; None after a dry run.

    Raises:
        RecipeError: see `parse_plan`, `load_data` and `with_lengths_checked`; or the output folder cannot be written,
            or has no checkpoint to resume from.
        CardError: the adapter's model card would be rejected, see `check_card_fields`.
        ModelUnavailableError: the model is missing or cannot be loaded.
    """
    plan = parse_plan(config, words)
    run, training = plan.run, plan.training
    checkpoint = _checkpoint(training)
    source = find_smollm2(run.model_name_or_path, revision=run.model_revision, progress=say)
    _check_card(plan, source)
    data = load_data(run, getattr(training, "dataset_text_field", "text"))
    require_answers(data.test, run.metrics or ())
    if data.test is None and str(training.eval_strategy.value) != "no":
        raise RecipeError(
            f"Got eval_strategy: {training.eval_strategy.value} without a test split, expected one to evaluate on. "
            "Fix: set dataset_test_split or dataset_test_name, or eval_strategy: no."
        )
    tokenizer = load_tokenizer(source)
    if run.chat_format and tokenizer.chat_template is not None:
        test = None if data.test is None else in_chat_form(data.test)
        data = RunData(in_chat_form(data.train), test, data.record)
    model_config = load_config(source)
    context = getattr(model_config, "max_position_embeddings", None)
    data = with_lengths_checked(data, run, tokenizer, training.max_length, context)
    if dry_run:
        say(yaml.safe_dump(resolved(plan), sort_keys=False).rstrip())
        say(first_batch(plan, model_config, tokenizer, data))
        return None
    try:
        Path(training.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"Got output_dir: {training.output_dir} ({error.strerror}), expected a folder to write to. "
            "Fix: choose another."
        ) from error
    say(f"Loading {source.published_name or source.path} ({source.origin}) ...")
    set_seed(training.seed)  # the adapter's initial values are drawn before the trainer sets the seed
    model = load_model(source, getattr(torch, run.dtype), attn_implementation=run.attn_implementation)
    return _train(plan, source, model, tokenizer, data, checkpoint, say)


def _train(
    plan: RunPlan,
    source: ModelSource,
    model: Any,
    tokenizer: Any,
    data: RunData,
    checkpoint: str | None,
    say: Callable[[str], object],
) -> RunResult:
    training = plan.training
    settings = _public_settings(plan)
    clock, memory = StepClock(), FewStepsMemory()
    set_seed(training.seed)
    trainer = build_trainer(plan, model, tokenizer, data, [clock, memory])
    say(f"Judging the base model on {data.record.test_rows} rows ..." if data.test is not None else "No test split.")
    before = _evaluate(plan, trainer, tokenizer, data)
    began = time.monotonic()
    set_seed(training.seed)
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.monotonic() - began
    trainer.save_model()
    say(f"Saved the adapter in {training.output_dir}.")
    after = _evaluate(plan, trainer, tokenizer, data)
    measured = {step.step: step.peaks for step in memory.steps if step.peaks}
    unmeasured = [value for step, value in clock.seconds.items() if step not in measured]
    environment = Environment.here(str(training.device))
    libraries = {name: version(name) for name in _LIBRARIES}
    result = RunResult(
        trainer=plan.run.trainer,
        base_model=_public_model(source),
        base_revision=_revision(source, model),
        method=plan.run.method,
        exact=_is_exact(plan),
        settings=settings,  # from before PEFT replaced "all-linear" by the model's names
        training_arguments={n: v for n, v in training_settings(training).items() if n not in _OF_THIS_MACHINE},
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
    if trainer.is_world_process_zero():
        _write(result, Path(training.output_dir), say)
    return result


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


def _checkpoint(training: Any) -> str | None:
    """The checkpoint to resume from: a folder, or the output folder's last one for `resume_from_checkpoint: true`."""
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() == "true":
        folder = Path(training.output_dir)
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if last is None:
            raise RecipeError(
                f"Got resume_from_checkpoint: true with no checkpoint in {folder}, expected one. Fix: name the folder "
                "of a checkpoint, or leave it out to start over; save_steps says how often one is written."
            )
        return str(last)
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise RecipeError(
            f"Got resume_from_checkpoint: {wanted}, which is no checkpoint, expected a folder with "
            "trainer_state.json. Fix: name one of output_dir's checkpoint folders, or true for the last one."
        )
    return str(wanted)


def _check_card(plan: RunPlan, source: ModelSource) -> None:
    """Refuse now what the model card would be rejected for once the adapter is trained."""
    public = _public_model(source)
    check_card_fields(
        base_model=public if "/" in public else None,
        method=plan.run.method,
        settings=_public_settings(plan),
        exact=_is_exact(plan),
        license=plan.run.license,
        language=plan.run.language,
    )


def _is_exact(plan: RunPlan) -> bool:
    return plan.run.method != "sage" or getattr(plan.adapter, "token_budget", None) == 1


def _public_settings(plan: RunPlan) -> dict[str, Any]:
    return {name: value for name, value in adapter_settings(plan.adapter).items() if name != "activation_store_dir"}


def _revision(source: ModelSource, model: Any) -> str | None:
    if source.gguf_file is not None:
        return f"{WHEEL} ({source.gguf_file})" if source.published_name is not None else None
    return getattr(model.config, "_commit_hash", None)


def _public_model(source: ModelSource) -> str:
    if source.published_name is not None:
        return source.published_name
    path = Path(source.path)
    return (source.gguf_file or path.resolve().name) if path.exists() else source.path


def _write(result: RunResult, output: Path, say: Callable[[str], object]) -> None:
    write_result(result, output / RESULTS_NAME)
    say(f"Wrote {output / RESULTS_NAME}.")
    if plot_learning_curve(result, output / CURVE_NAME):
        say(f"Drew {output / CURVE_NAME}.")
    else:
        say(f"Drew no {CURVE_NAME}: no loss was logged, or matplotlib is missing (pip install 'hf_memeff[demo]').")
    for name, values in result.evaluation.items():
        say(f"{name:>28}  base {values.base:.4f}  adapter {values.adapter:.4f}")
    if result.peak_bytes is not None:
        say(f"{'peak memory of a step':>28}  {result.peak_bytes / 2**20:.1f} MiB above weights and optimizer state")
    if result.seconds_per_step is not None:
        say(f"{'time of a step':>28}  {result.seconds_per_step:.3f} s")
