"""The same adapter trained several ways on the same rows, over seeds and settings: fine-tuning runs, one by one.

Every run is one of `hf-memeff finetune`, with a folder and results of its own. A sweep that was interrupted goes on
where it was: a run whose results are there is not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, set_seed

from hf_memeff.benchmarks.comparison import with_shared_weights
from hf_memeff.benchmarks.progress import progress
from hf_memeff.benchmarks.results import ResultsError
from hf_memeff.benchmarks.sage_methods import SageMethod, expand
from hf_memeff.benchmarks.sage_results import method_key
from hf_memeff.recipes.errors import RecipeError, make_output
from hf_memeff.recipes.model_source import ModelSource
from hf_memeff.recipes.parsing import RunPlan, parse_plan
from hf_memeff.recipes.preparing import Prepared, load_base, prepare, public_model, public_settings
from hf_memeff.recipes.results import RESULTS_NAME, RunResult, read_result, write_result
from hf_memeff.recipes.sweep_arguments import SweepArguments, method_changes
from hf_memeff.recipes.sweep_progress import StepReport, quiet_datasets
from hf_memeff.recipes.sweep_results import SweepRun, write_sweep
from hf_memeff.recipes.training import public_arguments, train

SWEEP_NAME = "sweep.json"
_ADAPTER_NAME = "adapter_model.safetensors"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        setting: name of the setting.
        method: how it trains.
        plan: what `train` takes; it writes to a folder of its own.
    """

    setting: str
    method: SageMethod
    plan: RunPlan


def run_sweep(
    config: Path, words: Sequence[str] = (), say: Callable[[str], object] = tqdm.write
) -> tuple[list[SweepRun], Path]:
    """Run a config by each of its methods and seeds, in each of its settings.

    Args:
        config: YAML file with the keys of a fine-tuning config and of `SweepArguments`.
        words: command-line words that replace fields of it.
        say: called with each line for the user.

    Returns:
        The runs, and the file that they are in, `SWEEP_NAME` in the config's output folder.

    Raises:
        RecipeError: see `parse_plan` and `prepare`; or there is no test split, or the random model's config has no such
            field. Everything is checked for every run before the first begins.
        CardError: see `prepare`.
        ModelUnavailableError: the model is missing or cannot be loaded.
    """
    output = Path(parse_plan(config, words, own=SweepArguments).training.output_dir)
    planned = plan_runs(config, words)
    settings = {name: _prepare(runs[0].plan, say) for name, runs in planned.items()}
    done: list[SweepRun] = []
    with quiet_datasets(), progress(sum(map(len, planned.values()))) as advance:
        for name, runs in planned.items():
            base: Any = None
            known: Mapping[str, float] | None = None
            for run in runs:
                title = f"{name}, {run.method.title}, seed {run.plan.training.seed}"
                advance(title, 0)
                folder = make_output(run.plan.training.output_dir)
                result = _finished(run.plan, settings[name], folder)
                if result is None:
                    base = _base(run.plan, settings[name]) if base is None else base
                    report = StepReport(title, advance)
                    result = _trained(run.plan, settings[name], with_shared_weights(base), known, report)
                    write_result(result, folder / RESULTS_NAME)
                known = {metric: values.base for metric, values in result.evaluation.items()}
                done.append(SweepRun(name, run.method, result))
                write_sweep(done, output / SWEEP_NAME)
                say(_line(done[-1]))
                advance(name, 1)
    return done, output / SWEEP_NAME


def plan_runs(config: Path, words: Sequence[str] = ()) -> dict[str, list[PlannedRun]]:
    """The runs of a sweep by setting, seed after seed.

    Raises:
        RecipeError: see `parse_plan`.
    """
    whole = parse_plan(config, words, own=SweepArguments)
    planned: dict[str, list[PlannedRun]] = {}
    for name, changes in whole.own.by_setting.items():
        own = parse_plan(config, words, own=SweepArguments, changes=changes).own
        planned[name] = []
        for seed in own.seeds:
            for method in expand(own.methods, own.budgets):
                folder = Path(whole.training.output_dir) / name / f"{method_key(method)}-seed{seed}"
                fixed = method_changes(method.name, method.token_budget) | {"seed": seed, "output_dir": str(folder)}
                plan = parse_plan(config, words, own=SweepArguments, changes={**changes, **fixed})
                planned[name].append(PlannedRun(name, method, plan))
    return planned


def _prepare(plan: RunPlan, say: Callable[[str], object]) -> Prepared:
    """Model, tokenizer and data of a setting; a random model gets its config."""
    prepared = prepare(plan, say)
    if prepared.data.test is None:
        raise RecipeError(
            "Got a sweep without a test split, expected rows to judge by. Fix: set dataset_test_split or "
            "dataset_test_name."
        )
    changes = plan.own.random_fields
    return prepared if changes is None else _with_random_model(prepared, changes)


def _with_random_model(prepared: Prepared, changes: Mapping[str, Any]) -> Prepared:
    config = prepared.model_config
    unknown = [name for name in changes if not hasattr(config, name)]
    if unknown:
        raise RecipeError(
            f"Got random_model with {', '.join(unknown)}, expected fields of {type(config).__name__}. "
            "Fix: leave them out, or check the spelling."
        )
    layers = config.num_hidden_layers
    # a list with an entry per layer is the config's own to make again
    kept = {n: v for n, v in config.to_dict().items() if not (isinstance(v, list) and len(v) == layers)}
    changed = type(config)(**{**kept, **changes})
    words = ", ".join(f"{name} {value}" for name, value in changes.items())
    path = f"{config.model_type} of random weights, {words}"
    return replace(prepared, model_config=changed, source=ModelSource(path, None, "random weights"))


def _base(plan: RunPlan, prepared: Prepared) -> Any:
    if plan.own.random_fields is None:
        return load_base(plan, prepared.source)
    set_seed(plan.training.seed)
    return AutoModelForCausalLM.from_config(prepared.model_config, dtype=getattr(torch, plan.run.dtype)).eval()


def _trained(
    plan: RunPlan, prepared: Prepared, model: Any, known: Mapping[str, float] | None, report: StepReport
) -> RunResult:
    return train(
        plan,
        prepared,
        model,
        base_values=known,
        keep_adapter=plan.own.keep_adapters,
        report=report,
        say=lambda line: None,
    )


def _finished(plan: RunPlan, prepared: Prepared, folder: Path) -> RunResult | None:
    """The results in a run's folder, if they are of this very run."""
    try:
        found = read_result(folder)
    except ResultsError:
        return None
    wanted = {
        "trainer": plan.run.trainer,
        "base_model": public_model(prepared.source),
        "method": plan.run.method,
        "settings": json.loads(json.dumps(public_settings(plan))),
        "training_arguments": json.loads(json.dumps(public_arguments(plan))),
        "dataset": prepared.data.record,
        "seed": plan.training.seed,
    }
    same = all(getattr(found, name) == value for name, value in wanted.items())
    same &= set(plan.run.metrics or ()) <= set(found.evaluation)
    same &= not plan.own.keep_adapters or (folder / _ADAPTER_NAME).is_file()
    return found if same else None


def _line(run: SweepRun) -> str:
    result = run.result
    peak = "" if result.peak_bytes is None else f", {result.peak_bytes / 2**20:.1f} MiB"
    seconds = "" if result.seconds_per_step is None else f", {result.seconds_per_step:.2f} s a step"
    loss = result.evaluation["eval_loss"]
    return (
        f"{run.setting}, {run.method.title}, seed {result.seed}: test loss {loss.base:.4f} -> {loss.adapter:.4f}"
        f"{peak}{seconds}"
    )
