"""Arguments that the benchmarks' command lines share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--output``, a folder with a default."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("hf_memeff_bench"),
        metavar="DIR",
        help=f"folder for {what} (default: %(default)s)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, a file that the results are written to as well."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE too")


def at_least(smallest: int) -> Callable[[str], int]:
    """A parser of integers from a smallest one."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(f"got {text}, expected an integer from {smallest}")
        return number

    return parse
