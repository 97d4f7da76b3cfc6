"""The tables say what was measured, and name what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_memeff.benchmarks.sage_methods import LORA, SageMethod
from hf_memeff.benchmarks.sage_steps import CHECKPOINTING
from hf_memeff.benchmarks.sage_tables import (
    cosine_table,
    cosine_variants_table,
    learning_note,
    learning_table,
    main_rate,
    method_rows,
    other_rates_table,
    recovered_shares,
    runs_of,
    steps_table,
    time_ratio,
)
from hf_memeff.benchmarks.tables import NOT_MEASURED


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a Markdown table by the first ones; those of the header under its own first cell."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {line[0]: line[1:] for line in cells}


def test_recovered_is_of_lora_s_improvement_with_the_same_seed(learning) -> None:
    shares = recovered_shares(learning, "gsm8k", SageMethod("sage-gradient", 0.25))
    assert shares == pytest.approx({0: 0.98 / 1.0, 1: 0.88 / 0.9, 2: 0.78 / 0.8})
    assert recovered_shares(learning, "gsm8k", LORA) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert [run.learning_rate for run in runs_of(learning, "gsm8k", LORA)] == [1e-3] * 3
    assert main_rate([run for run in learning if run.seed], "gsm8k") == 1e-3  # of the seeds that are there
    assert main_rate(learning, "boolq") is None
    assert recovered_shares(learning, "boolq", LORA) == {}
    assert recovered_shares(learning[1:], "gsm8k", LORA) == {}
    without = [r for r in learning if (r.method, r.seed) != ("lora", 2)]
    assert set(recovered_shares(without, "gsm8k", SageMethod("sage-gradient", 0.25))) == {0, 1}


def test_the_learning_table_names_missing_seeds(learning) -> None:
    table = rows(learning_table(learning, "gsm8k"))
    assert table["base model"][0] == "2.0000"
    assert table["LoRA"] == ["1.1000", "1.000", "1.000 to 1.000", "2.00", "100.0", ""]
    assert table["SAGE, gradient, 0.25"] == ["1.1200", "0.978", "0.975 to 0.980", "2.00", "100.0", ""]
    assert table["SAGE, attention, 0.25"][1:3] == ["0.725", "0.700 to 0.750"]
    assert table["SAGE, attention, 0.25"][-1] == "seed 1"
    assert table["SAGE, value norm, 0.125"] == ["-", "-", "-", "-", "-", "seed 0, 1, 2"]
    assert table["MeSP"][-1] == "seed 0"
    assert len(table) == 2 + 1 + 2 + 4 * 3
    assert learning_table(learning, "boolq") == NOT_MEASURED


def test_another_rate_is_judged_by_lora_with_that_rate_and_stays_out_of_the_main_table(learning) -> None:
    assert other_rates_table(learning, "gsm8k") == NOT_MEASURED
    other = [
        replace(learning[-1], method="sage-gradient", token_budget=0.25, seed=0, learning_rate=3e-4, test_loss=1.6)
    ]
    assert learning_table([*learning, *other], "gsm8k") == learning_table(learning, "gsm8k")
    table = rows(other_rates_table([*learning, *other], "gsm8k"))
    assert table["0.0003"] == ["SAGE, gradient, 0.25", "0", "1.6000", "1.5000", "0.800"]
    assert len(table) == 3


def test_the_note_has_every_rate_that_was_tried(learning) -> None:
    note = learning_note(learning, "gsm8k")
    assert "100 steps of 4 rows of at most 160 tokens" in note
    assert "5000 answer tokens of 64 held-out rows" in note
    assert "with seed 0: 0.0003 (1.5000), 0.001 (1.0000)" in note
    assert learning_note(learning[:1], "gsm8k") == NOT_MEASURED


def test_steps_are_compared_by_cpu_time_with_one_thread_and_by_wall_time_with_more(steps) -> None:
    sage = steps[2]
    assert time_ratio(sage, LORA) == pytest.approx(0.75)
    assert time_ratio(sage, CHECKPOINTING) == pytest.approx(0.5)
    threaded = replace(sage, environment=replace(sage.environment, threads=2))
    assert time_ratio(threaded, LORA) == pytest.approx((9 + 3) / 2)
    assert time_ratio(threaded, CHECKPOINTING) == pytest.approx(3.0)
    untimed: dict[str, Any] = {name: () for name in sage.__dict__ if name.endswith("_seconds")}
    assert time_ratio(replace(sage, **untimed), LORA) is None


def test_the_steps_table_names_what_is_missing(steps) -> None:
    table = rows(steps_table(steps))
    assert table["LoRA"] == ["1,000.0", "900.0", "1.00", "0.67", ""]
    assert table["SAGE, attention, 0.25"] == ["80.0", "40.0", "0.75", "0.50", ""]
    assert table["SAGE, gradient, 0.5"] == ["-", "-", "-", "-", NOT_MEASURED]
    assert steps_table([]) == NOT_MEASURED


def test_cosines_by_budget_and_by_variant(cosines) -> None:
    table = rows(cosine_table(cosines))
    assert table["attention"] == ["0.85 (0.80)", "0.45 (0.40)", "-", "-", "-", "-"]
    assert table["gradient"] == ["-", "0.86 (0.84)", "-", "-", "0.75 (0.70)", "-"]
    assert table["random"] == ["-"] * 6
    variants = cosine_variants_table(cosines)
    assert "| attention | none | kept | 0.35 (0.30) | 0.65 (0.30) | - | - |" in variants
    assert "| gradient | last | all | 0.86 (0.84) | 0.92 (0.84) | 0.75 (0.70) | 0.85 (0.70) |" in variants
    assert "| random | last | all | - | - | - | - |" in variants
    assert cosine_table([]) == cosine_variants_table([]) == NOT_MEASURED


def test_the_row_of_the_methods_table(steps, cosines) -> None:
    (row,) = method_rows(steps, cosines)
    assert row[0] == "SAGE (`SageConfig`, budget 0.25)" and row[1] == "approximate; cosine to LoRA's 0.45"
    assert "0.50 of LoRA + gradient checkpointing, 0.75 of LoRA (SmolLM2-135M, 4 x 512 tokens)" in row[3]
    assert row[2].endswith("of MeSP (SmolLM2-135M, 4 x 512 tokens)")
    assert method_rows([], cosines) == []
    assert method_rows(steps, [])[0][1] == "approximate"
