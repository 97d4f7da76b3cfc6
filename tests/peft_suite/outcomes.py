"""What the tests of a run did, and how a method's run compares with LoRA's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .excepted import reasons_of

MOST_EXCEPTED = 10
"""Excepted tests that a method may have."""


@dataclass(frozen=True)
class Outcome:
    """What one test did.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        used: whether the test made a config of the run's class, or added an adapter with one.
        seconds: of setup, call and teardown.
        why: first words of the failure, or the reason of the skip.
    """

    outcome: str
    used: bool
    seconds: float
    why: str


@dataclass(frozen=True)
class Comparison:
    """A method's run of the tests that pass for LoRA and use LoraConfig.

    Attributes:
        method: name of the method.
        required: tests that pass for LoraConfig and use it.
        passed: those of them that pass and use the method's config.
        unused: those of them that pass without using the method's config; they prove nothing and are not in `passed`.
        excepted: those of them that do something else for a known reason: the reason by id.
        failed: the others: what the test said by id.
    """

    method: str
    required: int
    passed: int
    unused: tuple[str, ...]
    excepted: Mapping[str, str]
    failed: Mapping[str, str]

    @property
    def holds(self) -> bool:
        """Whether what passes for LoRA passes, but for few enough excepted tests."""
        return not self.failed and len(self.excepted) <= MOST_EXCEPTED

    @staticmethod
    def total(method: str, parts: Iterable[Comparison]) -> Comparison:
        """The comparison over several files' tests."""
        parts = list(parts)
        return Comparison(
            method,
            sum(part.required for part in parts),
            sum(part.passed for part in parts),
            tuple(test for part in parts for test in part.unused),
            {test: reason for part in parts for test, reason in part.excepted.items()},
            {test: reason for part in parts for test, reason in part.failed.items()},
        )


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Outcomes by test id, from a record, the last of each test.

    A file that is not there holds none; a line that was cut short is left out.

    Args:
        path: file with one JSON object a line, as `add_outcome` writes it.
    """
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        name = entry.pop("test")
        outcomes[name] = Outcome(**entry)
    return outcomes


def add_outcome(path: Path, test: str, outcome: Outcome) -> None:
    """Add one test's outcome to a record."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, **asdict(outcome)}) + "\n")


def passed_tests(outcomes: Mapping[str, Outcome]) -> set[str]:
    """The tests that passed."""
    return {name for name, test in outcomes.items() if test.outcome == "passed"}


def required(test: Outcome) -> bool:
    """Whether a method has to pass a test, by LoRA's outcome: it passes for LoraConfig and uses it."""
    return test.outcome == "passed" and test.used


def required_tests(lora: Mapping[str, Outcome]) -> list[str]:
    """The tests that a method has to pass."""
    return [name for name, test in lora.items() if required(test)]


def compare(method: str, lora: Mapping[str, Outcome], own: Mapping[str, Outcome]) -> Comparison:
    """Hold a method's outcomes against LoRA's.

    Args:
        method: such as "mesp".
        lora: outcomes with LoraConfig.
        own: outcomes with the method's config. A test that is missing, or skipped, has not passed.
    """
    names = required_tests(lora)
    reasons = reasons_of(method)
    passed = 0
    unused: list[str] = []
    excepted: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in names:
        test = own.get(name, Outcome("missing", False, 0.0, "the test did not run"))
        if test.outcome == "passed" and test.used:
            passed += 1
        elif test.outcome == "passed":
            unused.append(name)
        elif name in reasons:
            excepted[name] = reasons[name]
        else:
            failed[name] = f"{test.outcome}: {test.why}"
    return Comparison(method, len(names), passed, tuple(unused), excepted, failed)
