"""Fill the marked blocks of README with what the committed results say.

A block is ``<!-- memeff:begin NAME -->`` ... ``<!-- memeff:end -->``, on lines of its own or within a line. The same
name may occur several times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hf_memeff.benchmarks import tables
from hf_memeff.benchmarks.results import read_family_results, read_method_results

_BLOCK = re.compile(r"(<!-- memeff:begin ([\w-]+) -->)(.*?)(<!-- memeff:end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- memeff:(?:begin|end)\b")


class RenderError(ValueError):
    """A text whose blocks cannot be filled; the message says which and why."""


def blocks(results_folder: Path) -> dict[str, str]:
    """The content of every block, by name, from ``mesp.json`` and ``families.json``."""
    results = read_method_results(results_folder / "mesp.json")
    families = read_family_results(results_folder / "families.json")
    return {
        "methods": tables.methods_table(results),
        "peak": tables.peak_table(results),
        "time": tables.time_table(results),
        "other-cases": tables.other_cases_table(results),
        "measured-on": tables.measured_on(results),
        "disk-store": tables.disk_sentence(results),
        "families": tables.support_matrix(families),
        "families-measured-on": tables.measured_on(families),
        "gpu": tables.gpu_note(results),
        "gpu-store": tables.gpu_note(results, "mesp-cpu"),
    }


def fill(text: str, contents: Mapping[str, str]) -> str:
    """Replace what is inside of the blocks of a text.

    Args:
        text: with marks.
        contents: by block name; each has to occur.

    Returns:
        The text with the contents: on lines of their own where the begin mark ends its line, in place elsewhere.

    Raises:
        RenderError: a mark without its other half, a block without content, or a content without block.
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
    missing = sorted(set(contents) - seen)
    if missing:
        raise RenderError(
            f"Got no block {missing[0]!r}, expected all of {', '.join(contents)}. "
            f"Fix: add <!-- memeff:begin {missing[0]} --><!-- memeff:end -->."
        )
    return filled


def render_file(path: Path, results_folder: Path, *, write: bool = True) -> bool:
    """Fill the blocks of a file from a folder of results.

    Args:
        path: UTF-8 text with one block of every name that `blocks` gives.
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
