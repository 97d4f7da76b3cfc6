"""AnchorAttention's tables, claims, pictures and README blocks, from made-up results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_memeff.benchmarks.anchor_claims import claims, claims_table
from hf_memeff.benchmarks.anchor_plot import plot_density, plot_heat, plot_speed
from hf_memeff.benchmarks.anchor_results import HeatResult, NeedleResult, OpResult, PeerResult, PrefillResult
from hf_memeff.benchmarks.anchor_rules import TITLES
from hf_memeff.benchmarks.anchor_tables import (
    complete_layers,
    method_rows,
    needle_table,
    op_layers_table,
    op_speed,
    op_table,
    peer_note,
    peer_table,
    prefill_table,
)
from hf_memeff.benchmarks.render import blocks
from hf_memeff.benchmarks.results import Environment, write_results
from hf_memeff.benchmarks.tables import NOT_MEASURED

ENVIRONMENT = Environment("Test CPU", 2, 1, None, "Linux x86_64", {"torch": "2.13.0"}, "abc", "2026-01-02")


def op(tokens: int, layer: int, speed: float, setting: str = "calibrated", **fields: object) -> OpResult:
    result = OpResult(
        model="SmolLM2-135M",
        tokens=tokens,
        rope_factor=1.0,
        layer=layer,
        setting=setting,
        step=8,
        calibration_tokens=8192,
        path="sparse",
        density=0.1 * (layer + 1),
        attended_share=0.3,
        recall=0.96 + layer / 100,
        recall_5th=0.9,
        output_error=0.02,
        temporary_bytes=12,
        q_bytes=10,
        seconds=(1.0, 2.0, 9.0),
        sdpa_seconds=(speed, 2 * speed, 9 * speed),
        clock="CPU time of the process",
        environment=ENVIRONMENT,
    )
    return replace(result, **fields)


def needle(tokens: int, method: str, answers: tuple[str, ...], density: float = 0.2) -> NeedleResult:
    return NeedleResult(
        model="SmolLM2-135M",
        tokens=tokens,
        method=method,
        step=None if method == "dense" else 8,
        calibration_tokens=None,
        questions=("a?", "b?"),
        depths=(0.1, 0.2),
        expected=("42", "43"),
        answers=answers,
        answer_losses=(0.5, 0.7),
        densities=(density, density),
        sparse_calls=(30, 60),
        environment=ENVIRONMENT,
    )


def peer(method: str, density: float, layer: int = 3, recall: float = 0.96) -> PeerResult:
    return PeerResult(
        model="SmolLM2-135M",
        tokens=8192,
        layer=layer,
        method=method,
        shifts=(-1.0, 0.0),
        parameters=(1.0, 2.0),
        variants=("", ""),
        recalls=(0.93, recall),
        densities=(density / 2, density),
        rows=64,
        calibration_tokens=8192,
        environment=ENVIRONMENT,
    )


@pytest.fixture
def ops() -> list[OpResult]:
    """8192 and 16384 tokens calibrated, 2048 densely, and the default at 8192."""
    return [
        op(16384, 0, 3.0),
        op(8192, 0, 1.2),
        op(8192, 1, 2.0),
        op(2048, 0, 1.0, path="short", density=1.0, recall=1.0, recall_5th=1.0),
        op(8192, 0, 0.9, "theta-12"),
    ]


@pytest.fixture
def prefills() -> list[PrefillResult]:
    """Twice as fast with a loss half a percent higher."""
    times = {"seconds": (10.0, 20.0), "dense_seconds": (20.0, 40.0), "losses": (2.01, 2.01), "dense_losses": (2.0, 2.0)}
    return [
        PrefillResult(
            model="SmolLM2-135M",
            tokens=8192,
            setting="calibrated",
            step=8,
            calibration_tokens=8192,
            density=0.1,
            sparse_calls=60,
            clock="CPU time of the process",
            environment=ENVIRONMENT,
            **times,
        )
    ]


@pytest.fixture
def needles() -> list[NeedleResult]:
    return [
        needle(8192, "sinks-window", (" no", " no"), 0.0),
        needle(8192, "dense", (" 42", " 43.")),
        needle(8192, "anchor", (" 42", " 44")),
    ]


@pytest.fixture
def peers() -> list[PeerResult]:
    """Layer 3 with every rule, of which the calibrated one needs the fewest keys, and layer 5 with one."""
    return [*(peer(method, 0.2 + index / 10) for index, method in enumerate(TITLES)), peer("anchor", 0.9, layer=5)]


@pytest.fixture
def heat() -> HeatResult:
    return HeatResult("SmolLM2-135M", 8192, 17, 4, 2, (-1.0, -9.0, -2.0, -1.5), (1.0, 0.0, 0.3, 1.0), ENVIRONMENT)


def test_op_tables(ops: list[OpResult]) -> None:
    assert op_speed(ops[1:3]) == pytest.approx((2 * 1.2 + 2 * 2.0) / 4)
    assert op_speed([ops[0], replace(ops[1], seconds=(), sdpa_seconds=())]) is None
    lines = op_table(ops).splitlines()[2:]
    assert lines == [
        "| 2048 | calibrated for 0.95 | 0 | 1.00x | 1.000 | 1.000 | 1.000 | 1.000 | 0.020 | 1.20 |",
        "| 8192 | calibrated for 0.95 | 0 to 1 | 1.60x | 0.150 | 0.965 | 0.960 | 0.900 | 0.020 | 1.20 |",
        "| 16384 | calibrated for 0.95 | 0 | 3.00x | 0.100 | 0.960 | 0.960 | 0.900 | 0.020 | 1.20 |",
        "| 8192 | theta 12 (default) | 0 | 0.90x | 0.100 | 0.960 | 0.960 | 0.900 | 0.020 | 1.20 |",
    ]
    layers = op_layers_table(ops, 8192).splitlines()[2:]
    assert layers == ["| 0 | 1.20x | 0.100 | 0.960 | 0.900 | 0.020 |", "| 1 | 2.00x | 0.200 | 0.970 | 0.900 | 0.020 |"]


def test_the_row_among_all_methods_tells_the_longest_prefill_and_the_longest_attention(
    ops: list[OpResult], prefills: list[PrefillResult]
) -> None:
    shorter = replace(prefills[0], tokens=2048, seconds=(40.0, 80.0))
    (row,) = method_rows(ops, [shorter, *prefills])
    assert row[3] == (
        "prefill of 8192 tokens 2.00x as fast as sdpa, loss +0.5 % (SmolLM2-135M); its attention alone 3.00x at 16384 "
        "tokens"
    )
    assert method_rows([], []) == []


def test_other_tables(prefills: list[PrefillResult], needles: list[NeedleResult], peers: list[PeerResult]) -> None:
    expected = "| 8192 | 2 | 30.0 | 15.0 | 2.00x | 0.100 | 2.0000 | 2.0100 | +0.50 % |"
    assert prefill_table(prefills).splitlines()[2] == expected
    assert needle_table(needles).splitlines()[2:] == [
        "| 8192 | dense (sdpa) | 2 of 2 | 0.600 | - | - |",
        "| 8192 | AnchorAttention, calibrated | 1 of 2 | 0.600 | 0.200 | 30 |",
        "| 8192 | sinks + window | 0 of 2 | 0.600 | 0.000 | 30 |",
    ]
    assert complete_layers(peers) == [3]
    table = peer_table(peers).splitlines()
    assert table[0].endswith("| thresholds -1 | calibrated |")
    assert table[2] == "| AnchorAttention, calibrated | 0.100 at 0.930 | 0.200 at 0.960 |"
    assert "layers 3, all heads, 64 rows" in peer_note(peers)
    peers[2] = replace(peers[2], recalls=(0.93, 0.9))
    assert "0.400 at 0.900 (1 layers off by more than 0.005)" in peer_table(peers)


def test_claims_that_fail_are_told_like_any_other(
    ops: list[OpResult], prefills: list[PrefillResult], needles: list[NeedleResult], peers: list[PeerResult]
) -> None:
    held = {claim.text: claim.holds for claim in claims(ops, prefills, needles, peers)}
    assert held["speed of the op against sdpa, 8192 tokens, calibrated for 0.95"] is True
    assert held["speed of the op against sdpa, 16384 tokens, calibrated for 0.95"] is True
    assert held["speed of the op against sdpa, 32768 tokens, calibrated for 0.95"] is None
    assert held["recall, mean over rows and layers, 8192 tokens, calibrated for 0.95"] is True
    assert held["time by sdpa's where it decides for dense"] is True
    assert held["loss at 8192 tokens by dense loss"] is True
    assert held["needles found at 8192 tokens, as many as dense"] is False
    assert held["needles that sinks + window finds at 8192 tokens"] is True
    assert held["needles found at 4096 tokens, as many as dense"] is None
    assert held["density by that of FlexPrefill at equal recall"] is True
    slow = claims([op(8192, 0, 1.4, recall=0.94)], [], [], [peer(m, 0.9 - i / 10) for i, m in enumerate(TITLES)])
    held = {claim.text: claim.holds for claim in slow}
    assert held["speed of the op against sdpa, 8192 tokens, calibrated for 0.95"] is False
    assert held["recall, mean over rows and layers, 8192 tokens, calibrated for 0.95"] is False
    assert held["density by that of FlexPrefill at equal recall"] is False
    assert "| at least 1.50 | 1.400 | no |" in claims_table([op(8192, 0, 1.4)], [], [], [])


def test_the_speed_is_of_the_quickest_calibration_that_keeps_enough() -> None:
    def quick(*loose: OpResult) -> tuple[float | None, bool | None]:
        found = claims([op(8192, 0, 1.4), op(8192, 1, 1.4), *loose], [], [], [])
        return found[0].measured, found[0].holds

    assert quick() == (pytest.approx(1.4), False)
    both = [op(8192, layer, 2.0, "calibrated-0.9", recall=recall) for layer, recall in enumerate((0.94, 0.97))]
    assert quick(*both) == (pytest.approx(2.0), True)
    assert quick(both[1]) == (pytest.approx(1.4), False)  # other layers
    assert quick(both[0], replace(both[1], recall=0.95)) == (pytest.approx(1.4), False)
    assert quick(op(8192, 0, 2.0, "theta-12"), op(8192, 1, 2.0, "theta-12")) == (pytest.approx(1.4), False)
    words = claims([op(8192, 0, 1.4), op(8192, 0, 2.0, "calibrated-0.9")], [], [], [])[0].text
    assert words.endswith("8192 tokens, calibrated for 0.9")


def test_nothing_measured_is_said() -> None:
    for text in (op_table([]), prefill_table([]), needle_table([]), peer_table([]), claims_table([], [], [], [])):
        assert text == NOT_MEASURED


def test_pictures(ops: list[OpResult], peers: list[PeerResult], heat: HeatResult, tmp_path: Path) -> None:
    assert plot_speed(ops, tmp_path / "speed.svg")
    assert plot_density(peers, tmp_path / "density.svg")
    assert plot_heat(heat, tmp_path / "heat.svg")
    text = (tmp_path / "density.svg").read_text()
    assert all(title in text for title in TITLES.values())
    assert "layer 17, head 4" in (tmp_path / "heat.svg").read_text()
    first = (tmp_path / "heat.svg").read_bytes()
    assert plot_heat(heat, tmp_path / "heat.svg") and (tmp_path / "heat.svg").read_bytes() == first
    assert not plot_speed([], tmp_path / "no.svg") and not plot_density(peers[:1], tmp_path / "no.svg")
    assert not (tmp_path / "no.svg").exists()


def test_readme_blocks(
    ops: list[OpResult],
    prefills: list[PrefillResult],
    needles: list[NeedleResult],
    peers: list[PeerResult],
    tmp_path: Path,
) -> None:
    names = ("claims", "op", "op-layers", "prefill", "needle", "peers", "peers-note", "measured-on")
    empty = blocks(tmp_path)
    assert all(empty[f"anchor-{name}"] == NOT_MEASURED for name in names)
    for name, results in (("op", ops), ("prefill", prefills), ("needle", needles), ("peers", peers)):
        write_results(results, tmp_path / f"anchor_{name}.json")
    filled = blocks(tmp_path)
    assert filled["anchor-op"] == op_table(ops)
    assert filled["anchor-op-layers"] == op_layers_table(ops, 8192)
    assert filled["anchor-needle"] == needle_table(needles)
    assert filled["anchor-measured-on"].startswith("Test CPU, 2 cores, 1 threads")
    assert all(filled[f"anchor-{name}"] != NOT_MEASURED for name in names)
