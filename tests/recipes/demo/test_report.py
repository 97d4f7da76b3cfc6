"""The report says what was measured, and what did not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_memeff.benchmarks.comparison import EXACT_METHODS, MethodFigures, wrap
from hf_memeff.benchmarks.results import Environment
from hf_memeff.recipes.demo.options import DemoOptions
from hf_memeff.recipes.demo.report import (
    DemoResult,
    Judgement,
    announcement,
    model_line,
    outcome,
    table,
    training_line,
)
from hf_memeff.recipes.demo.training import LORA_FIELDS
from hf_memeff.recipes.model_source import find_smollm2, load_model


@pytest.fixture
def result() -> DemoResult:
    peaks = {"lora": 800 * 2**20, "lora-checkpointing": 200 * 2**20, "mesp": 50 * 2**20}
    return DemoResult(
        method="mesp",
        model="owner/name",
        device="cpu",
        steps_wanted=48,
        steps=40,
        train_seconds=100.0,
        notes=["A note."],
        tickets=['{"item": 1}'],
        before=Judgement(2.5, 0.0, ["I am\n\nsorry."]),
        after=Judgement(0.04, 1.0, ['{"item": 1}']),
        trained_loss=0.0401,
        logit_difference=2e-6,
        foreign_modules=[],
        comparison_tokens=512,
        comparison=[MethodFigures(name, peaks[name], (2.0, 3.0, 10.0), 1.5, 3e-7, 0.75) for name in EXACT_METHODS],
        total_seconds=300.0,
        environment=Environment.here(),
    )


def test_nothing_failed(result: DemoResult) -> None:
    assert result.failures() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"after": Judgement(2.5, 0.0, [""])}, "did not lower"),
        ({"after": Judgement(float("nan"), 0.0, [""])}, "did not lower"),
        ({"foreign_modules": ["hf_memeff"]}, "imported hf_memeff"),
        ({"logit_difference": 0.1}, "differ by 1.0e-01"),
        ({"logit_difference": float("nan")}, "differ by nan"),
    ],
)
def test_each_failure_is_named(result: DemoResult, change: dict[str, object], message: str) -> None:
    (failure,) = replace(result, **change).failures()
    assert message in failure


def test_the_outcome_shows_scores_and_one_answer(result: DemoResult) -> None:
    text = outcome(result)
    for part in ("2.500", "0.00", "after 40 steps", "0.040", "1.00", "A note.", "I am sorry.", "2.0e-06"):
        assert part in text


def test_the_table_has_every_method_and_the_ratios(result: DemoResult) -> None:
    lines = table(result.comparison).splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["LoRA", "LoRA + gradient checkpointing", "MeSP"]
    assert "800.0 MiB" in lines[1]
    assert "3.00 s" in lines[1]
    assert "reference" in lines[1]
    assert "3.0e-07" in lines[3]
    assert "MeSP takes 0.25 of the memory of gradient checkpointing and 1.00 of its step time (3 paired" in lines[4]


def test_an_approximate_method_shows_its_cosine(result: DemoResult) -> None:
    sage = MethodFigures("sage", 100 * 2**20, (1.0, 1.5, 5.0), 0.75, 0.8, 0.654)
    lines = table([*result.comparison, sage]).splitlines()
    assert lines[4].startswith("SAGE") and "cosine 0.65" in lines[4]
    assert "SAGE takes 0.50 of the memory of gradient checkpointing and 0.50 of its step time" in lines[-1]


def test_what_is_not_measured_is_never_a_number(result: DemoResult) -> None:
    lines = table([replace(entry, peak_bytes=None) for entry in result.comparison]).splitlines()
    assert all("not measured" in line for line in lines[1:4])
    assert len(lines) == 4


def test_the_announcement_names_download_memory_disk_and_time() -> None:
    text = announcement(DemoOptions(minutes=7), "cpu", "nothing")
    for part in ("MeSP", "cpu", "download  nothing", "3 GB", "hf_memeff_demo", "7 minutes at most"):
        assert part in text
    assert "3 GB" not in announcement(DemoOptions(model="owner/large"), "cpu", "owner/large")


def test_a_shortened_training_says_so() -> None:
    assert "shortened from 48 to 20 steps" in training_line(DemoOptions(steps=48), 20, 3.0)
    assert "shortened" not in training_line(DemoOptions(steps=48), 48, 3.0)


def test_the_model_line_counts_parameters_and_paths(tiny_folder: Path) -> None:
    base = load_model(find_smollm2(str(tiny_folder)))
    assert "2 blocks structured" in model_line(base, wrap(base, "mesp", **LORA_FIELDS))
    plain = load_model(find_smollm2(str(tiny_folder)))
    assert "blocks" not in model_line(plain, wrap(plain, "lora", **LORA_FIELDS))
