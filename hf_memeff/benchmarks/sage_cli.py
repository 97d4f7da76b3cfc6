"""`hf-memeff bench sage`: learning, steps and gradients of SAGE, each part resumable."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_memeff.benchmarks.arguments import add_output, at_least
from hf_memeff.benchmarks.progress import progress
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_learning import LEARNING_NAMES, SEEDS, Learning, LearningPlan, planned_runs
from hf_memeff.benchmarks.sage_methods import BUDGETS
from hf_memeff.benchmarks.sage_results import LearningResult, Shelf, joined
from hf_memeff.benchmarks.sage_tables import learning_table
from hf_memeff.benchmarks.sage_text import DATA_SETS, DataError, read_texts

PARTS = ("learning",)

_DESCRIPTION = """\
Measure what SAGE costs, saves and learns, against LoRA and MeSP on SmolLM2-135M with real weights:
  learning  LoRA, MeSP and SAGE in each saliency and budget, trained on the same rows with LoRA's best learning rate of
            three, judged on held-out rows; 15 minutes a run on one core, many runs
Every result is a file of its own as soon as it is there. Run the same command again to go on: what is there is not
measured again, and the tables name what is missing.
"""
_EXAMPLES = """\
examples:
  hf-memeff bench sage --data FOLDER                       everything; a day on one core
  hf-memeff bench sage --only learning --data FOLDER --methods sage-gradient sage-random --budgets 0.25
  hf-memeff bench sage --only learning --data FOLDER --dataset boolq --seeds 0
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
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)} (all)"
    )
    files = ", ".join(name for data in DATA_SETS.values() for name in (data.train, data.test))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {files}")
    parser.add_argument(
        "--dataset", nargs="+", choices=DATA_SETS, default=list(DATA_SETS), metavar="D", help=", ".join(DATA_SETS)
    )
    parser.add_argument(
        "--methods", nargs="+", choices=LEARNING_NAMES, default=[], metavar="M", help=", ".join(LEARNING_NAMES)
    )
    parser.add_argument(
        "--budgets", nargs="+", type=_budget, default=list(BUDGETS), metavar="B", help="token budgets of SAGE"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=at_least(0),
        default=list(SEEDS),
        metavar="N",
        help="of the training runs; LoRA's learning rate is chosen on the first (default: 0 1 2)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=LearningPlan.steps,
        metavar="N",
        help="optimizer steps of a training run (default: %(default)s)",
    )
    add_output(parser, "results and plots")


def run(
    arguments: argparse.Namespace, load_smollm2: Callable[[torch.dtype], Any], load_tokenizer: Callable[[], Any]
) -> int:
    """Measure what the arguments ask for, and print the tables.

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
    base, tokenizer = load_smollm2(torch.float32), load_tokenizer()
    folder: Path = arguments.output / "sage"
    if "learning" in arguments.only:
        _learn(arguments, base, tokenizer, folder)
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


def _learn(arguments: argparse.Namespace, base: Any, tokenizer: Any, folder: Path) -> None:
    plan = LearningPlan(steps=arguments.steps)
    runs = planned_runs(
        plan,
        datasets=arguments.dataset,
        methods=arguments.methods,
        budgets=arguments.budgets,
        seeds=arguments.seeds,
    )
    shelf = Shelf(LearningResult, folder / "learning")
    with progress(len(runs) * plan.steps) as advance:
        Learning(
            plan,
            base,
            tokenizer,
            arguments.data,
            shelf,
            folder / "adapters",
            Environment.here(),
            say=tqdm.write,
            advance=advance,
        ).run(runs)
    results = shelf.all()
    joined(results, arguments.output / "sage_learning.json")
    print(_tables(results, arguments.dataset))


def _tables(results: Sequence[LearningResult], datasets: Sequence[str]) -> str:
    return "\n\n".join(f"{DATA_SETS[name].title}\n{learning_table(results, name)}" for name in datasets)


def _budget(text: str) -> float:
    try:
        budget = float(text)
    except ValueError:
        budget = 0.0
    if not 0 < budget <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0 and at most 1")
    return budget
