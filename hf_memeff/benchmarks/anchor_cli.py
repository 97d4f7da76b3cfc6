"""`hf-memeff bench anchor`: speed, recall, loss, retrieval and the density of other methods, each part resumable."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_memeff.benchmarks import anchor_needle, anchor_op
from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_claims import claims_table
from hf_memeff.benchmarks.anchor_density import PeerPlan, Peers
from hf_memeff.benchmarks.anchor_needle import NeedlePlan, Needles
from hf_memeff.benchmarks.anchor_op import OpPlan, Ops
from hf_memeff.benchmarks.anchor_plot import plot_density, plot_heat, plot_speed
from hf_memeff.benchmarks.anchor_prefill import PrefillPlan, Prefills
from hf_memeff.benchmarks.anchor_results import HeatResult, NeedleResult, OpResult, PeerResult, PrefillResult
from hf_memeff.benchmarks.anchor_tables import needle_table, op_table, peer_table, prefill_table
from hf_memeff.benchmarks.anchor_text import LongText, read_long_text
from hf_memeff.benchmarks.arguments import add_output, at_least
from hf_memeff.benchmarks.progress import progress
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf, joined
from hf_memeff.integrations.attention import register_anchor

PARTS = ("op", "prefill", "peers", "needle")

_DESCRIPTION = """\
Measure AnchorAttention on SmolLM2-135M with real weights and real text, against torch's own attention:
  op       one layer at a time at 2048 to 32768 tokens (beyond 8192 with stretched positions): paired time, density,
           recall and output error, with thresholds calibrated on other text and with the default; half an hour on
           one idle core up to 8192 tokens, half an hour more at 16384 and an hour more at 32768
  prefill  the whole model at 8192 tokens, time and next-token loss on the same texts; seven minutes
  peers    how many keys other methods' selection rules need for the same recall at 8192 tokens; a quarter of an hour
  needle   facts hidden in 2048 to 8192 tokens, asked for in their own and in other words; a quarter of an hour
The first part that needs them also calibrates thresholds, four minutes a calibration. Every result is a file of its own
as soon as it is there. Run the same command again to go on: what is there is not measured again.
"""
_EXAMPLES = """\
examples:
  hf-memeff bench anchor                                             everything; three hours on one core
  hf-memeff bench anchor --only op --lengths 8192 --layers 2 15 28   three layers, ten minutes
  hf-memeff bench anchor --only prefill needle --data FOLDER         on the *.txt files of a folder
  hf-memeff bench anchor --only peers --layers 15
"""


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `hf-memeff bench`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "anchor",
        help="speed, recall, loss and retrieval of AnchorAttention, and other methods' density",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder whose *.txt files are the text (default: the language reference that Python carries)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)}"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=at_least(512),
        default=[],
        metavar="N",
        help=f"tokens, of op (default: {_words(anchor_op.LENGTHS)}) and needle ({_words(anchor_needle.LENGTHS)})",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        type=at_least(0),
        default=[],
        metavar="N",
        help="of op and peers (default: all in op up to 8192 tokens, else six spread evenly)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(0),
        default=OpPlan.rounds,
        metavar="N",
        help="timed rounds of op (default: %(default)s)",
    )
    parser.add_argument(
        "--texts",
        type=at_least(1),
        default=PrefillPlan.texts,
        metavar="N",
        help="texts of prefill (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=at_least(2049),
        default=8192,
        metavar="N",
        help="tokens to calibrate on, which are not measured (default: %(default)s)",
    )
    add_output(parser, "results, thresholds, plots, and queries, keys and values (some GiB; they can be deleted)")


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
        DataError: the text is missing, or too short for what is asked for.
        ResultsError: a file of the output folder is in the way.
    """
    register_anchor()
    tokenizer = load_tokenizer()
    text = read_long_text(arguments.data, tokenizer, arguments.calibration_tokens)
    _check_text(arguments, text)
    session = _Session(arguments, load_smollm2(torch.float32), tokenizer, text)
    for part in PARTS:
        if part in arguments.only:
            getattr(session, part)()
    session.finish()
    return 0


def _check_text(arguments: argparse.Namespace, text: LongText) -> None:
    """Refuse a text that is too short before a model is loaded."""
    if "op" in arguments.only:
        text.measured(max(arguments.lengths or anchor_op.LENGTHS))
    if "prefill" in arguments.only:
        text.measured(PrefillPlan.tokens, arguments.texts - 1)
    if "peers" in arguments.only:
        text.measured(PeerPlan.tokens)
    if "needle" in arguments.only:
        text.measured(max(arguments.lengths or anchor_needle.LENGTHS))


class _Session:
    """One call of the command: what it was asked for, and what it measures with."""

    def __init__(self, arguments: argparse.Namespace, base: Any, tokenizer: Any, text: LongText) -> None:
        self.arguments, self.base, self.tokenizer, self.text = arguments, base, tokenizer, text
        self.environment = Environment.here()
        folder: Path = arguments.output / "anchor"
        self.qkv = folder / "qkv"
        self.calibrations = Calibrations(folder / "calibration", base, text.calibration())
        self.ops = Shelf(OpResult, folder / "op")
        self.prefills = Shelf(PrefillResult, folder / "prefill")
        self.peer_results = Shelf(PeerResult, folder / "peers")
        self.heat = Shelf(HeatResult, folder / "heat")
        self.needles = Shelf(NeedleResult, folder / "needle")

    def op(self) -> None:
        """Measure layers."""
        plan = OpPlan(layers=tuple(self.arguments.layers), rounds=self.arguments.rounds)
        lengths = self.arguments.lengths or anchor_op.LENGTHS
        bench = Ops(plan, self.base, self.text, self.calibrations, self.qkv, self.ops, self.environment)
        with progress(bench.steps(lengths)) as bench.advance:
            bench.run(lengths)

    def prefill(self) -> None:
        """Measure the whole model."""
        plan = PrefillPlan(texts=self.arguments.texts)
        bench = Prefills(plan, self.base, self.text, self.calibrations, self.prefills, self.environment)
        with progress(bench.steps()) as bench.advance:
            bench.run()

    def peers(self) -> None:
        """Compare selection rules."""
        plan = PeerPlan(layers=tuple(self.arguments.layers))
        bench = Peers(
            plan,
            self.base,
            self.text,
            self.calibrations,
            self.qkv,
            self.peer_results,
            self.heat,
            self.environment,
        )
        with progress(bench.steps()) as bench.advance:
            bench.run()

    def needle(self) -> None:
        """Ask for needles."""
        lengths = self.arguments.lengths or anchor_needle.LENGTHS
        bench = Needles(
            NeedlePlan(), self.base, self.tokenizer, self.text, self.calibrations, self.needles, self.environment
        )
        with progress(bench.steps(lengths)) as bench.advance:
            bench.run(lengths)

    def finish(self) -> None:
        """Join the files, draw, and print."""
        output: Path = self.arguments.output
        ops, prefills, peers = self.ops.all(), self.prefills.all(), self.peer_results.all()
        needles, heat = self.needles.all(), self.heat.all()
        joined(ops, output / "anchor_op.json")
        joined(prefills, output / "anchor_prefill.json")
        joined(peers, output / "anchor_peers.json")
        joined(needles, output / "anchor_needle.json")
        joined(heat, output / "anchor_heat.json")
        plot_speed(ops, output / "anchor_speed.svg")
        plot_density(peers, output / "anchor_density.svg")
        for result in heat[-1:]:
            plot_heat(result, output / "anchor_heat.svg")
        tables = {
            "Op": op_table(ops),
            "Prefill": prefill_table(prefills),
            "Peers": peer_table(peers),
            "Needles": needle_table(needles),
            "Claims": claims_table(ops, prefills, needles, peers),
        }
        print("\n\n".join(f"{title}\n{text}" for title, text in tables.items()))
        print(f"Wrote {output}")


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
