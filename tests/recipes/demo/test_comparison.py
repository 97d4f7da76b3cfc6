"""What the demo measures fits the time there is, and every method is measured on the same step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hf_memeff.recipes.demo.comparison import ComparisonPlan, compare_methods, plan_comparison, shortest_comparison
from hf_memeff.recipes.model_source import find_smollm2, load_model


def test_a_long_training_gets_more_rounds_and_a_short_one_one() -> None:
    assert plan_comparison(0.0, 48, 60.0).rounds == 4
    assert plan_comparison(0.0, 1000, 60.0).rounds == 5
    assert plan_comparison(0.0, 4, 60.0).rounds == 1


@pytest.mark.parametrize("available", [500.0, 100.0, 30.0, 14.0, 11.0])
def test_the_plan_fits_the_time(available: float) -> None:
    plan = plan_comparison(0.01, 48, available)
    assert plan.seconds <= available
    assert plan.seconds > 0


def test_a_fourth_method_takes_its_share_of_the_time() -> None:
    assert shortest_comparison(0.01, 4).seconds == pytest.approx(shortest_comparison(0.01).seconds * 4 / 3)
    assert plan_comparison(0.01, 48, 100.0, 4).seconds <= 100.0


def test_with_no_time_the_shortest_is_planned() -> None:
    assert plan_comparison(0.01, 48, 0.0) == shortest_comparison(0.01)
    assert shortest_comparison(0.01).rounds == 1


@pytest.mark.parametrize("method", ["mesp", "sage"])
def test_each_method_is_measured_on_the_base_model_which_stays_as_it_was(tiny_folder: Path, method: str) -> None:
    base = load_model(find_smollm2(str(tiny_folder)))
    names = [name for name, _ in base.named_parameters()]
    figures = compare_methods(base, method, ComparisonPlan(64, 2, 0.0), "cpu", time.monotonic() + 60)
    exact = ["lora", "lora-checkpointing", "mesp"]
    assert [entry.method for entry in figures] == (exact if method == "mesp" else [*exact, "sage"])
    assert all(len(entry.step_seconds) == 2 for entry in figures)
    assert figures[0].gradient_error == 0
    assert all(entry.gradient_error < 1e-5 for entry in figures[:3])
    assert all(entry.gradient_error > 1e-3 and 0.1 < entry.gradient_cosine < 1 for entry in figures[3:])
    peaks = [entry.peak_bytes or 0 for entry in figures]
    assert peaks[0] > peaks[1] > peaks[2] > 0
    assert [name for name, _ in base.named_parameters()] == names
