"""The counts side by side, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hf_memeff.benchmarks.peft_suite import SuiteResult
from hf_memeff.benchmarks.results import Environment, write_results

from .outcomes import MOST_EXCEPTED, Comparison, Outcome

Outcomes = Mapping[str, Mapping[str, Outcome]]
"""Outcomes by file and test."""

Compared = Mapping[str, Mapping[str, Comparison]]
"""Comparisons by method and file."""


def table(lora: Outcomes, compared: Compared) -> str:
    """Counts by file: of LoRA's tests, and of those of them that a method has to pass."""
    names = [name for name in lora if lora[name]]
    lines = [("file", "LoRA passed", "failed", "skipped", *(f"{m} passed" for m in compared))]
    for name in names:
        counts = Counter(test.outcome for test in lora[name].values() if test.outcome != "passed")
        required = next(iter(compared.values()))[name].required
        own = (_cell(by_file[name]) for by_file in compared.values())
        lines.append((name, str(required), str(counts["failed"]), str(counts["skipped"]), *own))
    totals = [Comparison.total(by_file.values()) for by_file in compared.values()]
    counts = Counter(test.outcome for tests in lora.values() for test in tests.values())
    own = (_cell(total) for total in totals)
    lines.append(("total", str(totals[0].required), str(counts["failed"]), str(counts["skipped"]), *own))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _cell(comparison: Comparison) -> str:
    others = {
        "excepted": len(comparison.excepted),
        "failed": len(comparison.failed),
        "not reached": len(comparison.unused),
    }
    notes = ", ".join(f"{count} {name}" for name, count in others.items() if count)
    return f"{comparison.passed}" + (f" ({notes})" if notes else "")


def details(compared: Compared) -> str:
    """The excepted tests with their reasons, and the failures."""
    lines = []
    for method, by_file in compared.items():
        total = Comparison.total(by_file.values())
        lines.append(
            f"\n{method}: passes {total.passed} of {total.required} tests that pass for LoRA and use LoraConfig; "
            f"{len(total.excepted)} excepted (at most {MOST_EXCEPTED}), {len(total.failed)} failed; "
            f"{len(total.unused)} pass without reaching the method's config."
        )
        lines += [f"  excepted {test}: {reason}" for test, reason in total.excepted.items()]
        lines += [f"  FAILED {test}: {' '.join(why.split())}" for test, why in total.failed.items()]
    return "\n".join(lines)


def write_counts(path: Path, lora: Outcomes, compared: Compared) -> None:
    """Write the totals as results of this package.

    Args:
        path: JSON file.
        lora: LoRA's outcomes.
        compared: the methods'.
    """
    counts = Counter(test.outcome for tests in lora.values() for test in tests.values())
    results = []
    for method, by_file in compared.items():
        total = Comparison.total(by_file.values())
        results.append(
            SuiteResult(
                method,
                tuple(name for name in lora if by_file[name].required),
                total.required,
                counts["failed"],
                counts["skipped"],
                total.passed,
                len(total.unused),
                tuple(f"{test}: {reason}" for test, reason in total.excepted.items()),
                tuple(total.failed),
                Environment.here(),
            )
        )
    write_results(results, path)
