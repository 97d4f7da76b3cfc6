"""The tests of PEFT that a method is excepted from, and why."""

from __future__ import annotations

BOTH = ("mesp", "sage")

EXCEPTED: tuple[tuple[tuple[str, ...], str, str], ...] = ()
"""Methods, id of the test in the run for LoRA, reason."""


def reasons_of(method: str) -> dict[str, str]:
    """Why a method is excepted, by test."""
    return {test: reason for methods, test, reason in EXCEPTED if method in methods}
