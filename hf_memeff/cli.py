"""The command `hf-memeff`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.comparison import METHODS
from hf_memeff.compat import PACKAGE_VERSION
from hf_memeff.recipes.demo.options import DEVICES, DemoError, DemoOptions
from hf_memeff.recipes.model_source import ModelUnavailableError, find_smollm2, load_model, load_tokenizer

_EXAMPLES = """\
examples:
  hf-memeff demo                 fine-tune SmolLM2-135M in about six minutes on two cores
  hf-memeff demo --steps 4       the same in about two minutes, to see that everything works
  hf-memeff bench mesp           measure MeSP against what else there is
"""
_DEMO_DESCRIPTION = """\
Fine-tune a small real model to answer order notes with JSON, load the adapter in stock PEFT, and compare LoRA, LoRA
with gradient checkpointing and MeSP. Needs no argument, and no connection once the model is on this machine. Exits
with 0 only if the training helped and stock PEFT agrees.
"""
_DEMO_EXAMPLES = """\
examples:
  hf-memeff demo
  hf-memeff demo --steps 4 --json result.json
  hf-memeff demo --method lora-checkpointing --output my_adapter
  hf-memeff demo --model Qwen/Qwen2.5-0.5B-Instruct --minutes 30
"""
_BENCH_EXAMPLES = """\
examples:
  hf-memeff bench mesp           memory, time and exactness of MeSP and what else there is
  hf-memeff bench mesp --help    what can be chosen
  hf-memeff bench sage           learning, memory, time and gradients of SAGE
  hf-memeff bench anchor         speed, recall, loss and retrieval of AnchorAttention
  hf-memeff bench families       which block layouts are known, and whether they are exact
  hf-memeff bench --render       write the measured figures into README.md
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 if everything worked, 1 if a result did not hold, 2 if an argument or the machine stood in
        the way, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser(words).parse_args(words)
    try:
        return int(arguments.run(arguments))
    except ModelUnavailableError as error:
        print(f"hf-memeff: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-memeff: interrupted", file=sys.stderr)
        return 130


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        words: the arguments to be parsed; the benchmarks are imported only if they name `bench`.

    Returns:
        A parser whose result has ``run``, a function from the result to the exit status.
    """
    parser = argparse.ArgumentParser(
        prog="hf-memeff",
        description="Memory-efficient LoRA training for Hugging Face models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-memeff {PACKAGE_VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    bench = commands.add_parser(
        "bench",
        help="measure memory, time and exactness",
        description="Measure memory, time and exactness, and write the results as JSON.",
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if next((word for word in words if not word.startswith("-")), None) == "bench":
        from hf_memeff.benchmarks import cli as benchmarks

        benchmarks.add_arguments(bench)
        bench.set_defaults(
            run=partial(
                benchmarks.run,
                load_smollm2=lambda dtype: load_model(find_smollm2(), dtype),
                load_tokenizer=lambda: load_tokenizer(find_smollm2()),
            )
        )
    return parser


def _add_demo(commands: Any) -> None:
    defaults = DemoOptions()
    demo = commands.add_parser(
        "demo",
        help="fine-tune a small model and compare the methods",
        description=_DEMO_DESCRIPTION,
        epilog=_DEMO_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--steps", type=int, default=defaults.steps, metavar="N", help="optimizer steps (default: %(default)s)"
    )
    demo.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder, a .gguf file, or a Hub id (default: SmolLM2-135M-Instruct, found or downloaded)",
    )
    demo.add_argument(
        "--method", choices=METHODS, default=defaults.method, help="how to train the adapter (default: %(default)s)"
    )
    demo.add_argument(
        "--device", choices=DEVICES, help="one device to run on (default: the first of these that this machine has)"
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=defaults.output,
        metavar="DIR",
        help="new or empty folder for the adapter (default: %(default)s)",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    demo.add_argument(
        "--minutes",
        type=float,
        default=defaults.minutes,
        metavar="M",
        help="time limit; training is shortened to keep it (default: %(default)g)",
    )
    demo.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> int:
    from hf_memeff.recipes.demo.reload import ReloadError
    from hf_memeff.recipes.demo.run import run_demo

    options = DemoOptions(
        steps=arguments.steps,
        model=arguments.model,
        method=arguments.method,
        device=arguments.device,
        output=arguments.output,
        json_file=arguments.json,
        minutes=arguments.minutes,
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler, the memory meter, logs two lines per use
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # renamings that concern PEFT
    try:
        failures = run_demo(options, say=_say).failures()
    except (DemoError, ReloadError) as error:
        print(f"hf-memeff: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        print(f"hf-memeff: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
