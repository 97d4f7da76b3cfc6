"""The support matrix is complete, and what is committed is what a fresh run gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memeff.benchmarks.families import FP32_LIMIT, FP64_LIMIT, holds, measure_families
from hf_memeff.benchmarks.results import RESULTS_FOLDER, read_family_results
from hf_memeff.blocks.layouts import LAYOUTS


@pytest.fixture(scope="module")
def committed():
    return {result.layer: result for result in read_family_results(RESULTS_FOLDER / "families.json")}


def test_every_layout_is_listed_under_its_name(committed) -> None:
    assert {layer: result.family for layer, result in committed.items()} == {
        layer: layout.name for layer, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("layer", ["LlamaDecoderLayer", "Gemma2DecoderLayer", "GPT2Block"])
def test_a_fresh_run_agrees_with_the_committed_one(layer: str, committed) -> None:
    (fresh,) = measure_families([layer])
    assert (fresh.family, fresh.path, fresh.reason) == (
        committed[layer].family,
        committed[layer].path,
        committed[layer].reason,
    )
    # rounding differs between processors, orders of magnitude do not
    assert committed[layer].fp64_error / 10 <= fresh.fp64_error <= 10 * committed[layer].fp64_error
    assert committed[layer].fp32_error / 10 <= fresh.fp32_error <= 10 * committed[layer].fp32_error


def test_all_committed_families_hold(committed) -> None:
    assert all(holds(result) for result in committed.values())


def test_a_fallback_or_an_error_does_not_hold(committed) -> None:
    good = committed["LlamaDecoderLayer"]
    assert not holds(replace(good, path="recompute"))
    assert not holds(replace(good, fp64_error=2 * FP64_LIMIT))
    assert not holds(replace(good, fp32_error=2 * FP32_LIMIT))
    assert not holds(replace(good, fp32_error=float("nan")))


def test_a_layout_without_a_tiny_model_is_an_error() -> None:
    with pytest.raises(KeyError, match="NewDecoderLayer"):
        list(measure_families(["NewDecoderLayer"]))
