"""Tables say what the results say, and nothing when there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memeff.benchmarks import tables
from hf_memeff.benchmarks.results import FamilyResult


def rows(table: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert set(lines[1]) == {"---"}
    assert len({len(line) for line in lines}) == 1
    return [lines[0], *lines[2:]]


def test_peaks_stand_by_method_and_length(sweep) -> None:
    assert rows(tables.peak_table(sweep)) == [
        ["peak, MiB", "512 tokens", "1024 tokens", "gradient error"],
        ["LoRA", "100.0", "200.0", "3e-07"],
        ["LoRA + gradient checkpointing", "50.0", "100.0", "3e-07"],
        ["LoRA + gradient checkpointing + tiled loss", "25.0", "50.0", "3e-07"],
        ["MeSP", "5.0", "10.0", "3e-07"],
    ]


def test_times_stand_by_method_and_length(sweep) -> None:
    untimed = [replace(r, step_seconds=(), reference_seconds=()) if r.method == "lora" else r for r in sweep]
    assert rows(tables.time_table(untimed)) == [
        ["step time", "512 tokens", "1024 tokens"],
        ["LoRA + gradient checkpointing", "1.00", "1.00"],
        ["LoRA + gradient checkpointing + tiled loss", "0.90", "0.90"],
        ["MeSP", "0.90", "0.90"],
    ]


def test_a_median_of_two_rounds_is_not_shown(sweep) -> None:
    short = [replace(r, step_seconds=(1.0, 1.0), reference_seconds=(2.0, 2.0)) for r in sweep]
    assert tables.time_table(short) == tables.NOT_MEASURED
    assert "0.50" not in tables.methods_table(short) + tables.other_cases_table(short)


def test_what_is_not_in_the_sweep_has_a_table_of_its_own(sweep) -> None:
    header, row = rows(tables.other_cases_table(sweep))
    assert header[:4] == ["model", "dtype", "tokens", "rank"]
    assert row[:4] == ["SmolLM2-135M (real weights)", "fp32", "1024", "16"]
    assert row[4:] == ["-", "-", "11.0", "-", "0.90", "3e-07"]


def test_the_methods_table_has_shares_of_the_measured_peaks(sweep) -> None:
    text = tables.methods_table(sweep)
    assert "5 % of LoRA, 10 % of LoRA + gradient checkpointing, 20 % of LoRA + gradient checkpointing + tiled" in text
    assert "0.90 of LoRA + gradient checkpointing" in text
    worse = [replace(r, gradient_error=4e-6) if r.method == "mesp" and r.tokens == 512 else r for r in sweep]
    assert "largest fp32 error measured: 4e-06" in tables.methods_table(worse)


def test_the_disk_store_is_told_by_both_meters(sweep, result) -> None:
    assert tables.disk_sentence(sweep) == tables.NOT_MEASURED
    disk = replace(result("mesp-disk", 1024, peak_mib=5.0), resident_bytes=6 * 2**20)
    both = [replace(r, resident_bytes=60 * 2**20) if r.method == "lora-checkpointing-tiled" else r for r in sweep]
    text = tables.disk_sentence([*both, disk])
    assert text.startswith("10 % of LoRA + gradient checkpointing + tiled loss at 1024 tokens")
    assert text.endswith("6 against 60 MiB, 10 %")
    assert "resident" not in tables.disk_sentence([*sweep, disk])


def test_the_gpu_note_goes_away_with_a_result_of_a_gpu(sweep, result) -> None:
    assert tables.gpu_note(sweep) == "never run on a GPU yet" == tables.gpu_note([])
    on_gpu = replace(result("mesp"), environment=replace(result().environment, gpu="Some GPU"))
    assert tables.gpu_note([*sweep, on_gpu]) == "measured on Some GPU"
    assert tables.gpu_note([*sweep, on_gpu], "mesp-cpu") == "never run on a GPU yet"
    assert tables.gpu_note([replace(on_gpu, method="mesp-cpu")], "mesp-cpu") == "measured on Some GPU"


def test_where_and_when_is_told_once_per_machine(sweep, result) -> None:
    text = tables.measured_on(sweep)
    assert text == "Test CPU, 2 cores, 1 threads, Linux x86_64; python 3.11.7, torch 2.13.0; 2026-01-02, commit abc"
    later = replace(result().environment, date="2026-02-03", commit=None, cpu="Other CPU")
    text = tables.measured_on([*sweep, replace(result(), environment=later)])
    assert "Test CPU" in text and "Other CPU" in text
    assert text.endswith("2026-01-02 to 2026-02-03, commit abc, unknown")


def test_the_support_matrix_gives_the_reason_of_a_fallback(result) -> None:
    good = FamilyResult("Llama", "LlamaDecoderLayer", "structured", "", 7e-16, 6e-7, result().environment)
    bad = replace(good, family="Odd", path="recompute", reason="its norm is odd", fp64_error=0.0)
    assert rows(tables.support_matrix([good, bad]))[1:] == [
        ["Llama", "`LlamaDecoderLayer`", "structured", "7e-16", "6e-07"],
        ["Odd", "`LlamaDecoderLayer`", "recompute (its norm is odd)", "0", "6e-07"],
    ]


@pytest.mark.parametrize(
    "table", ["peak_table", "time_table", "other_cases_table", "methods_table", "disk_sentence", "support_matrix"]
)
def test_without_results_nothing_is_claimed(table: str) -> None:
    assert getattr(tables, table)([]) == "not measured yet"


def test_one_length_is_no_sweep(result) -> None:
    assert tables.length_sweep([result(tokens=512)]) == []
    assert tables.peak_table([result(tokens=512)]) == tables.NOT_MEASURED
