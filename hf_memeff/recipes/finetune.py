"""`hf-memeff finetune`: a config in; an adapter, its results and its learning curve out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers.trainer_utils import get_last_checkpoint

from hf_memeff.recipes.errors import RecipeError, make_output
from hf_memeff.recipes.learning_curve import plot_learning_curve
from hf_memeff.recipes.parsing import parse_plan, resolved
from hf_memeff.recipes.preparing import load_base, prepare
from hf_memeff.recipes.results import RESULTS_NAME, RunResult, write_result
from hf_memeff.recipes.trainers import first_batch
from hf_memeff.recipes.training import train

CURVE_NAME = "learning_curve.svg"


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
    checkpoint = _checkpoint(plan.training)
    prepared = prepare(plan, say)
    if dry_run:
        say(yaml.safe_dump(resolved(plan), sort_keys=False).rstrip())
        say(first_batch(plan, prepared.model_config, prepared.tokenizer, prepared.data))
        return None
    output = make_output(plan.training.output_dir)
    source = prepared.source
    say(f"Loading {source.published_name or source.path} ({source.origin}) ...")
    result = train(plan, prepared, load_base(plan, source), checkpoint=checkpoint, say=say)
    if plan.training.process_index == 0:
        _write(result, output, say)
    return result


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
