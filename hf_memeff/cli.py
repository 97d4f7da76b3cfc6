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
  hf-memeff finetune run.yaml    train an adapter of your own with TRL, by SFT or DPO
  hf-memeff card my_adapter      write the model card of an adapter that finetune has trained
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
_CARD_EXAMPLES = """\
examples:
  hf-memeff card my_adapter
  hf-memeff card my_adapter --license apache-2.0 --reference my_lora_adapter
  hf-memeff card my_adapter --push my_name/my_adapter --private
"""
_FINETUNE_DESCRIPTION = """\
Train an adapter as a YAML file says: supervised or by DPO, with TRL's trainers. Its keys are the fields of SFTConfig or
DPOConfig, of MespConfig, SageConfig or LoraConfig, and a few for model, data and judging. Any of them may follow the
file as an option. Leaves the adapter, results.json and learning_curve.svg in output_dir.
"""
_FINETUNE_EXAMPLES = """\
examples:
  hf-memeff finetune examples/sft.yaml --dry-run       check everything, print the config and the first batch
  hf-memeff finetune examples/sft.yaml --max_steps 4   any field after the file
  hf-memeff finetune examples/dpo.yaml --resume_from_checkpoint true
  hf-memeff finetune examples/dpo.yaml --help          all fields
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
    _add_finetune(commands)
    _add_card(commands)
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


def _add_card(commands: Any) -> None:
    card = commands.add_parser(
        "card",
        help="render the model card of a trained adapter, and publish it",
        description="Render README.md for an adapter from the results JSON beside it, checked as the Hub checks it.",
        epilog=_CARD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    card.add_argument("folder", type=Path, metavar="DIR", help="the adapter's folder, with its results.json")
    card.add_argument("--base-model", metavar="ID", help="Hub id of a base model that was trained on from a folder")
    card.add_argument("--license", metavar="ID", help="licence of the adapter, as the Hub names it")
    card.add_argument("--language", metavar="CODE", help="language of the data, such as en")
    card.add_argument(
        "--reference",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="run to compare with, such as plain LoRA's with the same settings; may be repeated",
    )
    card.add_argument("--push", metavar="REPO", help="upload the adapter to this repository, with your own login")
    card.add_argument("--private", action="store_true", help="make a new repository private")
    card.set_defaults(run=_run_card)


def _run_card(arguments: argparse.Namespace) -> int:
    from hf_memeff.benchmarks.results import ResultsError
    from hf_memeff.recipes.card import CardOptions, write_card
    from hf_memeff.recipes.card_fields import CardError
    from hf_memeff.recipes.card_push import check_repository, push

    options = CardOptions(
        folder=arguments.folder,
        base_model=arguments.base_model,
        license=arguments.license,
        language=arguments.language,
        references=arguments.reference,
        repository=arguments.push,
    )
    try:
        if arguments.push is not None:
            check_repository(arguments.push)
        elif arguments.private:
            raise CardError("Got --private without --push, expected both. Fix: add --push REPO, or leave it out.")
        for line in write_card(options):
            _say(line)
        if arguments.push is not None:
            _say(f"Published: {push(options.folder, arguments.push, private=arguments.private)}")
    except (CardError, ResultsError) as error:
        print(f"hf-memeff: {error}", file=sys.stderr)
        return 2
    return 0


def _add_finetune(commands: Any) -> None:
    finetune = commands.add_parser(
        "finetune",
        help="train an adapter as a YAML file says, with TRL",
        description=_FINETUNE_DESCRIPTION,
        epilog=_FINETUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    finetune.add_argument("--dry-run", action="store_true", help="check, print config and first batch, load no weights")
    finetune.add_argument("config", type=Path, metavar="CONFIG.yaml", help="what to train, on what, and how")
    finetune.add_argument("fields", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="replaces a field of it")
    finetune.set_defaults(run=_run_finetune)


def _run_finetune(arguments: argparse.Namespace) -> int:
    from hf_memeff.recipes.card_fields import CardError
    from hf_memeff.recipes.errors import RecipeError, require_packages

    words = [word for word in arguments.fields if word != "--dry-run"]
    dry_run = arguments.dry_run or len(words) < len(arguments.fields)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler, the memory meter, logs two lines per use
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # renamings that concern TRL
    try:
        require_packages("trl", "trl", "datasets", "evaluate")
        from hf_memeff.recipes.finetune import finetune

        finetune(arguments.config, words, dry_run=dry_run, say=_say)
    except (RecipeError, CardError) as error:
        print(f"hf-memeff: {error}", file=sys.stderr)
        return 2
    return 0


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
