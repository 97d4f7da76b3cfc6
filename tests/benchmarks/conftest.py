"""Made-up results, so that tables, plots and rendering are tested without measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hf_memeff.benchmarks.cases import Case
from hf_memeff.benchmarks.results import Environment, MethodResult

MIB = 2**20

ENVIRONMENT = Environment(
    cpu="Test CPU",
    cores=2,
    threads=1,
    gpu=None,
    system="Linux x86_64",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    commit="abc",
    date="2026-01-02",
)


def made_up(method: str = "mesp", tokens: int = 1024, peak_mib: float = 10.0, ratio: float = 0.9) -> MethodResult:
    """A result on SmolLM2 in fp32 at rank 8."""
    case = Case("SmolLM2-135M", "fp32", tokens, 8)
    return MethodResult(
        case=case.key,
        model=case.model,
        weights="real",
        dtype="fp32",
        tokens=tokens,
        rank=8,
        method=method,
        device="cpu",
        seed=0,
        loss_tile_bytes=MIB,
        gradient_error=3e-7,
        gradient_error_limit=1e-5,
        peak_bytes=int(peak_mib * MIB),
        meter="cpu profiler",
        resident_bytes=None,
        step_seconds=(2 * ratio, 4 * ratio, 9 * ratio),
        reference_seconds=(2.0, 4.0, 9.0),
        environment=ENVIRONMENT,
    )


@pytest.fixture
def result() -> Callable[..., MethodResult]:
    """Makes a result; see `made_up`."""
    return made_up


@pytest.fixture
def sweep() -> list[MethodResult]:
    """Four methods at 512 and 1024 tokens, and one MeSP result at another rank."""
    peaks = {"lora": 200.0, "lora-checkpointing": 100.0, "lora-checkpointing-tiled": 50.0, "mesp": 10.0}
    results = [
        made_up(name, tokens, peak * tokens / 1024, ratio=1.0 if name == "lora-checkpointing" else 0.9)
        for tokens in (1024, 512)
        for name, peak in peaks.items()
    ]
    other = replace(made_up(peak_mib=11.0), rank=16, case="SmolLM2-135M/fp32/1024/r16")
    return [*results, other]
