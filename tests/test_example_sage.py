"""The examples that compare SAGE with LoRA: their commands parse, their small versions give tables of their shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from _examples import FOLDER, commands, run_small
from hf_memeff.benchmarks.sage_methods import NAMES
from hf_memeff.recipes.parsing import parse_plan
from hf_memeff.recipes.sweep_arguments import SweepArguments, method_changes


@pytest.mark.parametrize(("name", "number"), [("sage_commonsense", 3), ("sage_dpo", 3)])
def test_every_command_parses(name: str, number: int) -> None:
    found = commands(name)
    assert len(found) == number and found[0] == []
    for words in found:
        whole = parse_plan(FOLDER / f"{name}.yaml", words, own=SweepArguments)
        assert whole.run.trainer == ("dpo" if name == "sage_dpo" else "sft")
        assert whole.training.output_dir.startswith(name.partition("_")[0])
        for changes in whole.own.by_setting.values():
            fixed = {**changes, **method_changes("sage-gradient", 0.5)}
            plan = parse_plan(FOLDER / f"{name}.yaml", words, own=SweepArguments, changes=fixed)
            assert plan.run.method == "sage" and plan.adapter.saliency == "gradient"


@pytest.mark.parametrize("name", ["sage_commonsense", "sage_dpo", "anchor_needle"])
def test_scripts_are_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 80


def by_method(content: dict[str, Any], setting: str) -> dict[str, dict[str, Any]]:
    """A setting's rows, each checked to be of several seeds and finite."""
    rows = {row["method"]: row for row in content["rows"] if row["setting"] == setting}
    for row in rows.values():
        for spread in [*row["metrics"].values(), row["gain_share"], row["peak_bytes"], row["seconds_per_step"]]:
            assert math.isfinite(spread["mean"]) and spread["std"] is not None
        assert row["peak_bytes"]["mean"] > 0 and row["seconds_per_step"]["mean"] > 0
    return rows


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_commonsense_in_its_small_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_small("sage_commonsense", tmp_path, monkeypatch, capsys)
    content = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    pretrained, untrained = (by_method(content, setting) for setting in ("pretrained", "untrained"))
    assert set(pretrained) == set(NAMES) and len(untrained) == 4
    for rows in (pretrained, untrained):
        assert all(row["seeds"] == [0, 1, 2] for row in rows.values())
        assert rows["lora"]["metrics"]["eval_loss"]["mean"] < rows["lora"]["base"]["eval_loss"]
    assert len(content["runs"]) == 3 * (len(pretrained) + len(untrained))
    lines = [line for line in out.splitlines() if line.startswith(("| LoRA", "| MeSP", "| SAGE"))]
    assert len(lines) == len(pretrained) + len(untrained)
    exact = pretrained["lora"]["metrics"]["eval_loss"]["mean"]
    for name in ("lora-checkpointing", "mesp"):
        assert pretrained[name]["exact"]
        assert pretrained[name]["metrics"]["eval_loss"]["mean"] == pytest.approx(exact, rel=1e-3)
    peaks = {name: row["peak_bytes"]["mean"] for name, row in pretrained.items()}
    # on rows so short the loss is the peak of all but plain LoRA
    assert all(peak < peaks["lora"] for name, peak in peaks.items() if name != "lora")
    # nothing is salient to random weights, so that approximate gradients lose more there
    assert untrained["lora"]["gain_share"]["mean"] == 1
    assert untrained["sage-attention"]["gain_share"]["mean"] < 0.9
    assert "Least of LoRA's gain: SAGE, " in out


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_dpo_in_its_small_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_small("sage_dpo", tmp_path, monkeypatch, capsys)
    rows = by_method(json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8")), "main")
    assert list(rows) == ["lora", "sage-attention"]
    for row in rows.values():
        assert row["base"]["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert row["metrics"]["eval_rewards/margins"]["mean"] != 0
    assert rows["lora"]["metrics"]["eval_loss"]["mean"] < math.log(2)
    assert rows["sage-attention"]["peak_bytes"]["mean"] < rows["lora"]["peak_bytes"]["mean"]
    assert "rewards/margins" in out and "| SAGE, attention, 0.5" in out
