"""`hf-memeff bench`: measure, plot and render."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from hf_memeff.benchmarks import anchor_cli, sage_cli
from hf_memeff.benchmarks.arguments import add_json, add_output, at_least
from hf_memeff.benchmarks.cases import DTYPES, MODELS, Case, select_cases
from hf_memeff.benchmarks.families import holds, measure_families
from hf_memeff.benchmarks.journal import Journal
from hf_memeff.benchmarks.methods import METHODS
from hf_memeff.benchmarks.plot import plot_results
from hf_memeff.benchmarks.progress import progress
from hf_memeff.benchmarks.render import RenderError, render_file
from hf_memeff.benchmarks.results import RESULTS_FOLDER, Environment, ResultsError, write_results
from hf_memeff.benchmarks.run import Bench
from hf_memeff.benchmarks.sage_text import DataError

_MESP_DESCRIPTION = """\
Compare MeSP with PEFT's LoRA, LoRA with gradient checkpointing (non-reentrant and reentrant), each with and without a
tiled loss: peak memory above weights and gradients, step time in interleaved rounds, and first of all the gradients,
which have to be plain LoRA's before anything is measured. Results are written one by one, so that an interrupted run
goes on where it was; what this machine has measured with these versions is not measured again.
Without options: SmolLM2-135M with real weights at 128 to 2048 tokens, ranks 4 to 32 and bf16, and Qwen2.5-0.5B and
1.5B shapes with random weights; about two hours on two cores.
"""
_MESP_EXAMPLES = """\
examples:
  hf-memeff bench mesp --quick                             one case in a few minutes
  hf-memeff bench mesp --lengths 256 1024 --methods lora-checkpointing mesp
  hf-memeff bench mesp --models Qwen2.5-0.5B --dtypes bf16 --device cuda
  hf-memeff bench mesp --output results --json copy.json   all default cases, results in two places
"""
_FAMILIES_DESCRIPTION = """\
Build a tiny random model of every family whose decoder block is known, and compare gradients with plain LoRA's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options and commands of `hf-memeff bench` to its parser."""
    parser.add_argument("--render", action="store_true", help="fill the marked blocks of README.md from the results")
    parser.add_argument("--check", action="store_true", help="with --render: change nothing, exit 1 if it would")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), metavar="FILE", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="benchmark")
    mesp = commands.add_parser(
        "mesp",
        help="memory, time and exactness of MeSP and the alternatives",
        description=_MESP_DESCRIPTION,
        epilog=_MESP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mesp.add_argument("--quick", action="store_true", help="SmolLM2-135M at 256 tokens only")
    mesp.add_argument("--models", nargs="+", choices=MODELS, default=[], metavar="M", help=", ".join(MODELS))
    mesp.add_argument("--lengths", nargs="+", type=at_least(2), default=[], metavar="N", help="tokens of the sequence")
    mesp.add_argument("--ranks", nargs="+", type=at_least(1), default=[], metavar="R", help="ranks of the adapter")
    mesp.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[], metavar="D", help=", ".join(DTYPES))
    mesp.add_argument("--methods", nargs="+", choices=METHODS, default=[], metavar="M", help=", ".join(METHODS))
    mesp.add_argument("--rounds", type=at_least(0), metavar="N", help="timed rounds per case; 0 measures no time")
    mesp.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    mesp.add_argument("--force", action="store_true", help="measure again what is there already")
    add_output(mesp, "results and plot")
    add_json(mesp)
    families = commands.add_parser(
        "families", help="exactness and path of every known block layout", description=_FAMILIES_DESCRIPTION
    )
    add_output(families, "results")
    add_json(families)
    sage_cli.add_command(commands)
    anchor_cli.add_command(commands)


def run(
    arguments: argparse.Namespace, load_smollm2: Callable[[torch.dtype], Any], load_tokenizer: Callable[[], Any]
) -> int:
    """Run what the arguments ask for.

    Args:
        arguments: parsed by a parser that `add_arguments` has filled.
        load_smollm2: loads the real model's weights in a dtype.
        load_tokenizer: loads the real model's tokenizer.

    Returns:
        0 if everything held; 1 if a gradient was off or README is not as rendered; 2 if the machine or a file stood
        in the way.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler, the memory meter, logs two lines per use
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # renamings that concern PEFT
    transformers.utils.logging.disable_progress_bar()  # loading and saving would draw over the benchmark's own bar
    try:
        if arguments.render or arguments.check:
            return _render(arguments)
        if arguments.benchmark == "mesp":
            return _run_mesp(arguments, load_smollm2)
        if arguments.benchmark == "families":
            return _run_families(arguments)
        if arguments.benchmark == "sage":
            return sage_cli.run(arguments, load_smollm2, load_tokenizer)
        if arguments.benchmark == "anchor":
            return anchor_cli.run(arguments, load_smollm2, load_tokenizer)
    except (OSError, DataError, RenderError, ResultsError) as error:
        print(f"hf-memeff bench: {error}", file=sys.stderr)
        return 2
    print(
        "hf-memeff bench: got nothing to do, expected mesp, families, sage, anchor or --render. See --help.",
        file=sys.stderr,
    )
    return 2


def _run_mesp(arguments: argparse.Namespace, load_smollm2: Callable[[torch.dtype], Any]) -> int:
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print("hf-memeff bench: got --device cuda without a usable one. Fix: leave it out.", file=sys.stderr)
        return 2
    cases = select_cases(
        quick=arguments.quick,
        models=arguments.models,
        lengths=arguments.lengths,
        ranks=arguments.ranks,
        dtypes=arguments.dtypes,
        rounds=arguments.rounds,
    )
    path = arguments.output / "mesp.json"
    journal = Journal(path, Environment.here(device), arguments.force)
    print(_announcement(cases, arguments.methods, path, journal.environment))
    failures = _measure(journal, device, load_smollm2, cases, arguments.methods)
    results = list(journal.results.values())
    if arguments.json is not None:
        write_results(results, arguments.json)
    plotted = plot_results(results, arguments.output / "mesp.svg")
    print(f"Wrote {path}" + (f" and {arguments.output / 'mesp.svg'}" if plotted else ""))
    for failure in failures:
        print(f"hf-memeff bench: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _measure(
    journal: Journal,
    device: str,
    load_smollm2: Callable[[torch.dtype], Any],
    cases: Sequence[Case],
    methods: Sequence[str],
) -> list[str]:
    """Run the cases under a progress bar; returns what did not hold."""
    bench = Bench(journal, device, load_smollm2, say=tqdm.write)
    with progress(bench.steps(cases, methods)) as bench.advance:
        bench.run(cases, methods)
    return bench.failures


def _announcement(cases: Sequence[Case], methods: Sequence[str], path: Path, environment: Environment) -> str:
    needed = max(case.needed_bytes for case in cases)
    lines = {
        "cases": ", ".join(case.key for case in cases),
        "methods": ", ".join(methods) or "each case's own",
        "machine": environment.hardware(),
        "memory": f"up to {needed / 2**30:.0f} GiB; cases that do not fit are left out",
        "results": str(path),
    }
    return "\n".join(["hf-memeff bench mesp", *(f"  {name:<9}{text}" for name, text in lines.items())])


def _run_families(arguments: argparse.Namespace) -> int:
    path = arguments.output / "families.json"
    results = list(tqdm(measure_families(), unit="family"))
    write_results(results, path)
    if arguments.json is not None:
        write_results(results, arguments.json)
    for result in results:
        errors = f"fp64 {result.fp64_error:.0e}, fp32 {result.fp32_error:.0e}"
        print(f"{result.family:<16}{result.path:<12}{errors}  {result.reason}".rstrip())
    print(f"Wrote {path}")
    return 0 if all(map(holds, results)) else 1


def _render(arguments: argparse.Namespace) -> int:
    changed = render_file(arguments.readme, RESULTS_FOLDER, write=not arguments.check)
    if changed and arguments.check:
        print(
            f"hf-memeff bench: got {arguments.readme} with other figures than the results, expected the rendered one. "
            "Fix: hf-memeff bench --render.",
            file=sys.stderr,
        )
        return 1
    print(f"{arguments.readme}: {'rendered' if changed else 'already as rendered'}")
    return 0
