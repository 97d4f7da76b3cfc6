"""Fill the marked blocks of README with what the committed results say.

A block is ``<!-- memeff:begin NAME -->`` ... ``<!-- memeff:end -->``, on lines of its own or within a line. The same
name may occur several times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_memeff.benchmarks import anchor_claims, anchor_tables, sage_tables, tables
from hf_memeff.benchmarks.anchor_results import NeedleResult, OpResult, PeerResult, PrefillResult
from hf_memeff.benchmarks.peft_suite import SuiteResult, suite_sentence
from hf_memeff.benchmarks.results import read_family_results, read_method_results, read_results
from hf_memeff.benchmarks.sage_claims import claims_table
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult
from hf_memeff.benchmarks.sage_text import DATA_SETS

_BLOCK = re.compile(r"(<!-- memeff:begin ([\w-]+) -->)(.*?)(<!-- memeff:end -->)", re.DOTALL)
_ANCHOR_TOKENS = 8192  # of the table of AnchorAttention's layers, one by one
_MARK = re.compile(r"<!-- memeff:(?:begin|end)\b")


class RenderError(ValueError):
    """A text whose blocks cannot be filled; the message says which and why."""


def blocks(results_folder: Path) -> dict[str, str]:
    """The content of every block, by name, from the ``*.json`` that the benchmarks write."""
    results = read_method_results(results_folder / "mesp.json")
    families = read_family_results(results_folder / "families.json")
    steps = read_results(StepResult, results_folder / "sage_steps.json")
    cosines = read_results(CosineResult, results_folder / "sage_cosine.json")
    ops = read_results(OpResult, results_folder / "anchor_op.json")
    prefills = read_results(PrefillResult, results_folder / "anchor_prefill.json")
    others = [*sage_tables.method_rows(steps, cosines), *anchor_tables.method_rows(ops, prefills)]
    return {
        "methods": tables.methods_table(results, others),
        "peak": tables.peak_table(results),
        "time": tables.time_table(results),
        "other-cases": tables.other_cases_table(results),
        "measured-on": tables.measured_on(results),
        "disk-store": tables.disk_sentence(results),
        "families": tables.support_matrix(families),
        "families-measured-on": tables.measured_on(families),
        "gpu": tables.gpu_note(results),
        "gpu-store": tables.gpu_note(results, "mesp-cpu"),
        **_sage_blocks(read_results(LearningResult, results_folder / "sage_learning.json"), steps, cosines),
        "peft-suite": suite_sentence(read_results(SuiteResult, results_folder / "peft_suite.json")),
        **_anchor_blocks(ops, prefills, results_folder),
    }


def _sage_blocks(
    learning: Sequence[LearningResult], steps: Sequence[StepResult], cosines: Sequence[CosineResult]
) -> dict[str, str]:
    contents = {
        "sage-claims": claims_table(learning, steps, cosines),
        "sage-steps": sage_tables.steps_table(steps),
        "sage-cosine": sage_tables.cosine_table(cosines),
        "sage-cosine-variants": sage_tables.cosine_variants_table(cosines),
        "sage-measured-on": tables.measured_on([*learning, *steps, *cosines]),
    }
    for name in DATA_SETS:
        contents[f"sage-learning-{name}"] = sage_tables.learning_table(learning, name)
        contents[f"sage-learning-{name}-rates"] = sage_tables.other_rates_table(learning, name)
        contents[f"sage-learning-{name}-note"] = sage_tables.learning_note(learning, name)
    return contents


def _anchor_blocks(ops: Sequence[OpResult], prefills: Sequence[PrefillResult], folder: Path) -> dict[str, str]:
    needles = read_results(NeedleResult, folder / "anchor_needle.json")
    peers = read_results(PeerResult, folder / "anchor_peers.json")
    return {
        "anchor-claims": anchor_claims.claims_table(ops, prefills, needles, peers),
        "anchor-op": anchor_tables.op_table(ops),
        "anchor-op-layers": anchor_tables.op_layers_table(ops, _ANCHOR_TOKENS),
        "anchor-prefill": anchor_tables.prefill_table(prefills),
        "anchor-needle": anchor_tables.needle_table(needles),
        "anchor-peers": anchor_tables.peer_table(peers),
        "anchor-peers-note": anchor_tables.peer_note(peers),
        "anchor-measured-on": tables.measured_on([*ops, *prefills, *needles, *peers]),
    }


def fill(text: str, contents: Mapping[str, str]) -> str:
    """Replace what is inside of the blocks of a text.

    Args:
        text: with marks.
        contents: by block name; each that says more than that nothing was measured has to occur.

    Returns:
        The text with the contents: on lines of their own where the begin mark ends its line, in place elsewhere.

    Raises:
        RenderError: a mark without its other half, a block without content, or a measured content without block.
    """
    seen = set()

    def replace(match: re.Match[str]) -> str:
        begin, name, old, end = match.groups()
        if _MARK.search(old):
            raise RenderError(f"Got block {name!r} without an end of its own, expected <!-- memeff:end --> behind it.")
        if name not in contents:
            raise RenderError(f"Got block {name!r}, expected one of {', '.join(contents)}. Fix: correct its name.")
        seen.add(name)
        new = f"\n{contents[name]}\n" if old.startswith("\n") else contents[name]
        return begin + new + end

    filled = _BLOCK.sub(replace, text)
    if 2 * len(_BLOCK.findall(text)) != len(_MARK.findall(text)):
        raise RenderError("Got a begin or end mark alone, expected pairs. Fix: look at each <!-- memeff:... -->.")
    missing = sorted(name for name, new in contents.items() if name not in seen and new != tables.NOT_MEASURED)
    if missing:
        raise RenderError(
            f"Got no block {missing[0]!r}, expected all of {', '.join(contents)}. "
            f"Fix: add <!-- memeff:begin {missing[0]} --><!-- memeff:end -->."
        )
    return filled


def render_file(path: Path, results_folder: Path, *, write: bool = True) -> bool:
    """Fill the blocks of a file from a folder of results.

    Args:
        path: UTF-8 text with a block of every name that `blocks` gives a measured content for.
        results_folder: see `blocks`.
        write: False only looks.

    Returns:
        Whether the file was, or would be, changed.

    Raises:
        RenderError: see `fill`.
        OSError: the file is not there or cannot be written.
    """
    text = path.read_text(encoding="utf-8")
    filled = fill(text, blocks(results_folder))
    if write and filled != text:
        path.write_text(filled, encoding="utf-8", newline="\n")
    return filled != text
