"""Means, deviations and shares of a sweep, computed by hand beside the code; its table."""

from __future__ import annotations

import statistics

import pytest

from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_methods import LORA, SageMethod
from hf_memeff.recipes.results import DataRecord, MetricValues, RunResult, TrainRecord
from hf_memeff.recipes.sweep_results import Spread, SweepRun, least_gain, sweep_rows, sweep_table

SAGE = SageMethod("sage-gradient", 0.25)
ENVIRONMENT = Environment("cpu", 2, 1, None, "Linux", {}, None, "2026-12-01")


def ran(method: SageMethod, seed: int, loss: float, seconds: float | None = 2.0, setting: str = "a") -> SweepRun:
    result = RunResult(
        trainer="sft",
        base_model="m",
        base_revision=None,
        method=method.name.partition("-")[0],
        exact=method == LORA,
        settings={},
        training_arguments={},
        dataset=DataRecord("d", None, "train", 8, "test", 2),
        train=TrainRecord(2, 1.0, (), 4.0, None),
        evaluation={"eval_loss": MetricValues(4.0, loss), "exact_match": MetricValues(0.0, 0.5)},
        peak_bytes=(seed + 1) * 2**20,
        measured_steps=(2,),
        seconds_per_step=seconds,
        environment=ENVIRONMENT,
        seed=seed,
    )
    return SweepRun(setting, method, result)


@pytest.fixture
def runs() -> list[SweepRun]:
    """LoRA gains 2 and 1 of a loss of 4; SAGE gains 1.5 and 0.5."""
    return [ran(LORA, 0, 2.0), ran(SAGE, 0, 2.5), ran(LORA, 1, 3.0), ran(SAGE, 1, 3.5)]


def test_rows_are_means_and_deviations_over_the_seeds(runs: list[SweepRun]) -> None:
    lora, sage = sweep_rows(runs)
    assert (lora.title, lora.exact, lora.seeds) == ("LoRA", True, (0, 1))
    assert (sage.title, sage.exact, sage.token_budget) == ("SAGE, gradient, 0.25", False, 0.25)
    assert sage.metrics["eval_loss"] == Spread(3.0, statistics.stdev([2.5, 3.5]))
    assert sage.base == {"eval_loss": 4.0, "exact_match": 0.0}
    assert lora.gain_share == Spread(1.0, 0.0)
    assert sage.gain_share == Spread(0.625, statistics.stdev([0.75, 0.5]))
    assert lora.peak_bytes == Spread(1.5 * 2**20, statistics.stdev([2**20, 2**21]))
    assert least_gain(sweep_rows(runs)) == sage


def test_one_seed_has_no_deviation_and_an_unmeasured_time_no_value() -> None:
    (row,) = sweep_rows([ran(SAGE, 0, 2.5, seconds=None)])
    assert row.metrics["eval_loss"] == Spread(2.5, None) and row.seconds_per_step is None
    assert row.gain_share is None  # without LoRA
    assert least_gain([row]) is None


def test_no_share_of_a_gain_that_lora_has_not() -> None:
    rows = sweep_rows([ran(LORA, 0, 4.5), ran(SAGE, 0, 3.0)])
    assert [row.gain_share for row in rows] == [None, None]


def test_settings_stay_apart(runs: list[SweepRun]) -> None:
    rows = sweep_rows([*runs, ran(LORA, 0, 1.0, setting="b")])
    assert [(row.setting, row.method) for row in rows] == [("a", "lora"), ("a", "sage-gradient"), ("b", "lora")]
    assert "b, seeds 0 |" in sweep_table(rows, "b", ["eval_loss"])


def test_the_table(runs: list[SweepRun]) -> None:
    lines = sweep_table(sweep_rows(runs), "a", ["eval_loss", "exact_match"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["a, seeds 0, 1", "loss", "exact match", "share of LoRA's gain", "peak, MiB", "seconds a step"]
    assert cells[2] == ["base model", "4", "0", "-", "-", "-"]
    assert cells[4] == ["SAGE, gradient, 0.25", "3 ± 0.71", "0.5 ± 0", "0.625 ± 0.18", "1.5 ± 0.71", "2 ± 0"]
