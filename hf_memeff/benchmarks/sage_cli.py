"""`hf-memeff bench sage`: steps, learning and gradients of SAGE, each part resumable."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_memeff.benchmarks.arguments import add_output, at_least
from hf_memeff.benchmarks.progress import progress
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_claims import claims_table
from hf_memeff.benchmarks.sage_cosine import CosinePlan, Cosines, planned_cosines
from hf_memeff.benchmarks.sage_learning import Learning
from hf_memeff.benchmarks.sage_methods import BUDGETS, LORA, NAMES, SALIENCIES
from hf_memeff.benchmarks.sage_plot import plot_cosines, plot_learning
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult, learning_key
from hf_memeff.benchmarks.sage_runs import SEEDS, LearningPlan, best_rate, planned_runs
from hf_memeff.benchmarks.sage_steps import StepPlan, Steps, planned_steps, read_ids
from hf_memeff.benchmarks.sage_tables import cosine_table, learning_table, other_rates_table, steps_table
from hf_memeff.benchmarks.sage_text import DATA_SETS, DataError, in_order, read_rows, read_texts
from hf_memeff.benchmarks.shelf import Shelf, joined

PARTS = ("steps", "learning", "cosine")

_DESCRIPTION = """\
Measure what SAGE costs, saves and learns, against LoRA and MeSP on SmolLM2-135M with real weights:
  steps     peak memory, cached bytes and paired step time on 4 rows of 512 tokens; half an hour on one core
  learning  LoRA, MeSP and SAGE in each saliency and budget, trained on the same rows with LoRA's best learning rate of
            three, judged on held-out rows; about 15 minutes a run on one core, 42 runs for each data set
  cosine    SAGE's gradients against the exact ones, at random adapters and after LoRA's training; three hours
Every result is a file of its own as soon as it is there. Run the same command again to go on: what is there is not
measured again, and the tables name what is missing.
"""
_EXAMPLES = """\
examples:
  hf-memeff bench sage --data FOLDER                        everything; a day on one core
  hf-memeff bench sage --data FOLDER --only steps cosine    cost and direction without training
  hf-memeff bench sage --data FOLDER --only learning --dataset gsm8k --methods sage-gradient --budgets 0.25 --seeds 0
"""


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `hf-memeff bench`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "sage",
        help="learning, memory, time and gradients of SAGE",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = ", ".join(name for data in DATA_SETS.values() for name in (data.train, data.test))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {files}; needed")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)}"
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        choices=DATA_SETS,
        default=list(DATA_SETS),
        metavar="D",
        help=f"to train on: {', '.join(DATA_SETS)}; the first also gives the text of the other parts",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=NAMES,
        default=list(NAMES),
        metavar="M",
        help=f"{', '.join(NAMES)}; LoRA is always there to compare with",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=_budget,
        default=list(BUDGETS),
        metavar="B",
        help=f"token budgets of SAGE (default: {' '.join(map(str, BUDGETS))})",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=at_least(0),
        default=list(SEEDS),
        metavar="N",
        help=f"of training; the first chooses LoRA's learning rate (default: {' '.join(map(str, SEEDS))})",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        choices=LearningPlan.rates,
        default=[],
        metavar="R",
        help=f"learning rates to train with, out of the three that LoRA is tried with, "
        f"{' '.join(map(str, LearningPlan.rates))} (default: LoRA's best)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=LearningPlan.steps,
        metavar="N",
        help="optimizer steps of a training run (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(0),
        default=StepPlan.rounds,
        metavar="N",
        help="timed rounds of the part steps (default: %(default)s)",
    )
    add_output(parser, "results, trained adapters and plots")


def run(
    arguments: argparse.Namespace, load_smollm2: Callable[[torch.dtype], Any], load_tokenizer: Callable[[], Any]
) -> int:
    """Measure what the arguments ask for, then write joined results and plots, and print the tables.

    Args:
        arguments: parsed by the parser that `add_command` adds.
        load_smollm2: loads the real model's weights in a dtype.
        load_tokenizer: loads its tokenizer.

    Returns:
        0: everything asked for is there.

    Raises:
        DataError: a data set is missing.
        ResultsError: a file of the output folder is in the way.
    """
    _check_data(arguments)
    session = _Session(arguments, load_smollm2(torch.float32), load_tokenizer(), Environment.here())
    if "steps" in arguments.only:
        session.steps()
    if "learning" in arguments.only:
        session.learning()
    if "cosine" in arguments.only:
        session.cosine()
    session.finish()
    return 0


def _check_data(arguments: argparse.Namespace) -> None:
    """Refuse missing data before a model is loaded."""
    if arguments.data is None:
        raise DataError(
            f"Got no --data, expected the folder with {DATA_SETS[arguments.dataset[0]].train}. Fix: --data FOLDER."
        )
    for name in arguments.dataset:
        for split in ("train", "test"):
            read_texts(arguments.data, name, split)


@dataclass
class _Session:
    """One call of the command: what it was asked for, and what it measures with."""

    arguments: argparse.Namespace
    base: Any
    tokenizer: Any
    environment: Environment

    def __post_init__(self) -> None:
        folder: Path = self.arguments.output / "sage"
        self.adapters = folder / "adapters"
        self.runs = Shelf(LearningResult, folder / "learning")
        self.measured_steps = Shelf(StepResult, folder / "steps")
        self.cosines = Shelf(CosineResult, folder / "cosine")

    def steps(self) -> None:
        """Measure memory and time."""
        plan = StepPlan(dataset=self.arguments.dataset[0], rounds=self.arguments.rounds)
        ids = read_ids(self.arguments.data, plan.dataset, self.tokenizer, plan.rows, plan.tokens)
        bench = Steps(plan, self.base, ids, self.measured_steps, self.environment, say=tqdm.write)
        methods = [m for m in planned_steps(self.arguments.budgets) if m == LORA or m.name in self.arguments.methods]
        with progress(bench.steps(methods)) as bench.advance:
            bench.run(methods)

    def learning(self) -> None:
        """Train."""
        plan = LearningPlan(steps=self.arguments.steps)
        runs = planned_runs(
            plan,
            datasets=self.arguments.dataset,
            methods=self.arguments.methods,
            budgets=self.arguments.budgets,
            seeds=self.arguments.seeds,
            rates=self.arguments.rates,
        )
        bench = Learning(
            plan,
            self.base,
            self.tokenizer,
            self.arguments.data,
            self.runs,
            self.adapters,
            self.environment,
            say=tqdm.write,
        )
        with progress(len(runs) * plan.steps) as bench.advance:
            bench.run(runs)

    def cosine(self) -> None:
        """Measure gradients, after LoRA's training too if that is there."""
        plan = CosinePlan(dataset=self.arguments.dataset[0])
        # Held-out rows, since the trained adapter has seen the others.
        count = plan.batches * plan.rows_per_batch
        rows = read_rows(self.arguments.data, plan.dataset, "test", self.tokenizer, plan.longest_row, count)
        batches = in_order(rows, self.tokenizer.pad_token_id, plan.rows_per_batch)
        rate = best_rate(self.runs.all(), plan.dataset, LearningPlan.rates)
        key = learning_key(plan.dataset, LORA, self.arguments.seeds[0], rate or 0.0)
        trained = self.adapters / f"{key}.safetensors"
        known = trained if rate is not None and trained.exists() else None
        bench = Cosines(plan, self.base, batches, known, self.cosines, self.environment, say=tqdm.write)
        saliencies = [name for name in SALIENCIES if f"sage-{name}" in self.arguments.methods]
        methods = planned_cosines(self.arguments.budgets, saliencies)
        with progress(bench.steps(methods)) as bench.advance:
            bench.run(methods)

    def finish(self) -> None:
        """Join the files, draw, and print."""
        output: Path = self.arguments.output
        runs, steps, cosines = self.runs.all(), self.measured_steps.all(), self.cosines.all()
        joined(runs, output / "sage_learning.json")
        joined(steps, output / "sage_steps.json")
        joined(cosines, output / "sage_cosine.json")
        for name in DATA_SETS:
            plot_learning(runs, name, output / f"sage_learning_{name}.svg")
        plot_cosines(cosines, output / "sage_cosine.svg")
        learned = {
            f"{DATA_SETS[name].title}{words}": made(runs, name)
            for name in DATA_SETS
            for words, made in (("", learning_table), (", other learning rates", other_rates_table))
        }
        tables = {"Steps": steps_table(steps), **learned, "Gradients": cosine_table(cosines)}
        tables["Claims"] = claims_table(runs, steps, cosines)
        print("\n\n".join(f"{title}\n{text}" for title, text in tables.items()))
        print(f"Wrote {output}")


def _budget(text: str) -> float:
    try:
        budget = float(text)
    except ValueError:
        budget = 0.0
    if not 0 < budget <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0 and at most 1")
    return budget
