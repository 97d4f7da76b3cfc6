"""What a run of PEFT's own tests with a method's config says; `tests/peft_suite` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.tables import NOT_MEASURED


@dataclass(frozen=True)
class SuiteResult:
    """PEFT's tests run for a method, against the same tests run for LoRA.

    Attributes:
        method: name of the method.
        files: test files with tests that the method has to pass.
        required: tests that pass for LoraConfig and use it.
        lora_failed: tests of these and other files that fail for LoraConfig here, where there is no Hub and no GPU.
        lora_skipped: tests that are skipped for LoraConfig.
        passed: required tests that pass with the method's config and use it.
        unused: required tests that pass without using the method's config, and are not in `passed`.
        excepted: required tests that are excepted, each with its reason.
        failed: the other required tests.
        left_out: test files that were not run for the method, with the number of their tests and the reason.
        environment: what it was run with.
    """

    method: str
    files: tuple[str, ...]
    required: int
    lora_failed: int
    lora_skipped: int
    passed: int
    unused: int
    excepted: tuple[str, ...]
    failed: tuple[str, ...]
    left_out: tuple[str, ...]
    environment: Environment


def suite_sentence(results: Sequence[SuiteResult]) -> str:
    """One sentence with the counts of each method."""
    if not results:
        return NOT_MEASURED
    counts = "; ".join(
        f"{result.method}: {result.passed} of {result.required} pass, {len(result.excepted)} excepted"
        + (f", {len(result.failed)} failed" if result.failed else "")
        + (f", {result.unused} don't reach the method" if result.unused else "")
        for result in results
    )
    peft = results[0].environment.versions["peft"]
    files = len(results[0].files)
    return f"Of the tests in {files} files of peft {peft} that pass for `LoraConfig` and use it: {counts}."
