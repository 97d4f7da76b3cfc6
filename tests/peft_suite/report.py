"""The counts side by side, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from hf_memeff.benchmarks.peft_suite import SuiteResult
from hf_memeff.benchmarks.results import Environment, write_results

from .excepted import LEFT_OUT
from .outcomes import MOST_EXCEPTED, Comparison, Outcome, required

Outcomes = Mapping[str, Mapping[str, Outcome]]
"""Outcomes by file and test."""

Compared = Mapping[str, Mapping[str, Comparison]]
"""Comparisons by method and file."""


def table(lora: Outcomes, compared: Compared) -> str:
    """Counts by file: LoRA's tests that pass and use LoraConfig, that fail or are skipped, and what a method passes."""
    names = [name for name in lora if lora[name]]
    lines = [("file", "LoRA passed", "failed", "skipped", *(f"{m} passed" for m in compared))]
    for name in names:
        own = ("left out" if name in LEFT_OUT else _cell(by_file[name]) for by_file in compared.values())
        lines.append((name, *_counts(lora[name].values()), *own))
    own = (_cell(Comparison.total(method, by_file.values())) for method, by_file in compared.items())
    lines.append(("total", *_counts(test for name in names for test in lora[name].values()), *own))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _counts(tests: Iterable[Outcome]) -> tuple[str, str, str]:
    """LoRA's tests that pass and use LoraConfig, that fail, and that are skipped."""
    tests = list(tests)
    counts = Counter(test.outcome for test in tests)
    return str(sum(required(test) for test in tests)), str(counts["failed"]), str(counts["skipped"])


def _cell(comparison: Comparison) -> str:
    others = {
        "excepted": len(comparison.excepted),
        "failed": len(comparison.failed),
        "not reached": len(comparison.unused),
    }
    notes = ", ".join(f"{count} {name}" for name, count in others.items() if count)
    return f"{comparison.passed}" + (f" ({notes})" if notes else "")


def details(lora: Outcomes, compared: Compared) -> str:
    """What is left out, the excepted tests with their reasons, and the failures."""
    lines = [f"\nleft out {text}" for text in left_out(lora)]
    for method, by_file in compared.items():
        total = Comparison.total(method, by_file.values())
        lines.append(
            f"\n{method}: passes {total.passed} of {total.required} tests that pass for LoRA and use LoraConfig; "
            f"{len(total.excepted)} excepted (at most {MOST_EXCEPTED}), {len(total.failed)} failed; "
            f"{len(total.unused)} pass without reaching the method's config."
        )
        lines += [f"  excepted {test}: {reason}" for test, reason in total.excepted.items()]
        lines += [f"  FAILED {test}: {' '.join(why.split())}" for test, why in total.failed.items()]
    return "\n".join(lines)


def left_out(lora: Outcomes) -> tuple[str, ...]:
    """The files that no method runs, each with the number of tests that LoRA passes and the reason."""
    return tuple(
        f"{name}, {_counts(lora[name].values())[0]} tests that pass for LoRA: {reason}"
        for name, reason in LEFT_OUT.items()
        if lora.get(name)
    )


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
        total = Comparison.total(method, by_file.values())
        results.append(
            SuiteResult(
                method,
                tuple(name for name, part in by_file.items() if part.required),
                total.required,
                counts["failed"],
                counts["skipped"],
                total.passed,
                len(total.unused),
                tuple(f"{test}: {reason}" for test, reason in total.excepted.items()),
                tuple(total.failed),
                left_out(lora),
                Environment.here(),
            )
        )
    write_results(results, path)
