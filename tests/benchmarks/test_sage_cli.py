"""`hf-memeff bench sage`: its options, exit statuses and files."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

from hf_memeff.benchmarks import cli, sage_cli
from hf_memeff.benchmarks.results import read_results
from hf_memeff.benchmarks.sage_cosine import CosinePlan
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult
from hf_memeff.benchmarks.sage_runs import LearningPlan
from hf_memeff.benchmarks.sage_steps import StepPlan
from hf_memeff.benchmarks.sage_training import Training


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="hf-memeff bench")
    cli.add_arguments(found)
    return found


def never(*args: Any) -> None:
    raise AssertionError("nothing is to be loaded")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that suit the tiny model."""
    monkeypatch.setattr(sage_cli, "StepPlan", _Small(StepPlan, model="tiny", rows=2, tokens=32, rank=2))
    monkeypatch.setattr(sage_cli, "LearningPlan", _Small(LearningPlan, model="tiny", rank=2, test_rows=8))
    monkeypatch.setattr(sage_cli, "CosinePlan", _Small(CosinePlan, model="tiny", rank=2, batches=2))


class _Small:
    """A plan's class with other defaults."""

    def __init__(self, kind: Any, **fields: Any) -> None:
        self.kind, self.fields = kind, fields

    def __call__(self, **fields: Any) -> Any:
        return self.kind(**self.fields | fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)


def test_everything_is_measured_joined_drawn_and_told(
    small: None,
    base: Any,
    tokenizer: Any,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["sage", "--data", data, "--dataset", "gsm8k", "--budgets", 0.25, "--seeds", 0, "--steps", 3]
    words += ["--methods", "sage-attention", "sage-random", "--rounds", 1, "--output", tmp_path]
    arguments = parser().parse_args([str(word) for word in words])
    assert cli.run(arguments, lambda dtype: base, lambda: tokenizer) == 0
    learning = read_results(LearningResult, tmp_path / "sage_learning.json")
    assert [(r.method, r.steps) for r in learning] == [
        ("base", 0),
        *[("lora", 3)] * 3,
        ("sage-attention", 3),
        ("sage-random", 3),
    ]
    assert [r.method for r in read_results(StepResult, tmp_path / "sage_steps.json")] == ["lora", "sage-attention"]
    cosines = read_results(CosineResult, tmp_path / "sage_cosine.json")
    assert len(cosines) == 2 * 3 * 2  # saliencies, variants, adapters
    assert {(r.adapter, r.saliency) for r in cosines} == {
        (adapter, saliency) for adapter in ("random", "trained") for saliency in ("attention", "random")
    }
    assert (tmp_path / "sage_learning_gsm8k.svg").stat().st_size > 1000
    assert (tmp_path / "sage_cosine.svg").stat().st_size > 1000
    assert not (tmp_path / "sage_learning_boolq.svg").exists()
    out = capsys.readouterr().out
    assert "| SAGE, gradient, 0.5 | - | - | - | - | - | seed 0, 1, 2 |" in out
    assert "BoolQ\nnot measured yet" in out
    assert "| share of LoRA's improvement, gradient | at least 0.95 | - | not measured yet |" in out
    monkeypatch.setattr(Training, "step", never)
    assert cli.run(arguments, lambda dtype: base, lambda: tokenizer) == 0
    assert capsys.readouterr().out == out[out.index("Steps\n") :]  # before it, what was measured


def test_only_runs_the_parts_that_are_named(small: None, base: Any, tokenizer: Any, data: Path, tmp_path: Path) -> None:
    words = ["sage", "--data", data, "--only", "steps", "--methods", "mesp", "--rounds", 0, "--output", tmp_path]
    assert cli.run(parser().parse_args([str(word) for word in words]), lambda dtype: base, lambda: tokenizer) == 0
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["sage_steps.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Got no --data, expected the folder with gsm8k_train.jsonl"),
        (["--data", "EMPTY", "--dataset", "boolq"], "Got no boolq_train.json in"),
    ],
)
def test_missing_data_is_said_before_a_model_is_loaded(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path) if word == "EMPTY" else word for word in words]
    assert cli.run(parser().parse_args(["sage", *words]), never, never) == 2
    assert message in capsys.readouterr().err


def test_results_of_other_settings_are_status_2(
    small: None, base: Any, tokenizer: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sage", "--data", data, "--only", "learning", "--dataset", "gsm8k", "--methods", "lora", "--seeds", 0]
    for steps, status in ((1, 0), (2, 2)):
        own = parser().parse_args([str(word) for word in [*words, "--steps", steps, "--output", tmp_path]])
        assert cli.run(own, lambda dtype: base, lambda: tokenizer) == status
    assert "measured with steps=1, expected steps=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "speed"],
        ["--dataset", "trivia"],
        ["--methods", "sage-magic"],
        ["--budgets", "0"],
        ["--budgets", "nan"],
        ["--budgets", "1.5"],
        ["--budgets", "half"],
        ["--seeds", "-1"],
        ["--steps", "0"],
        ["--rounds", "few"],
    ],
)
def test_values_out_of_range_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["sage", *words])
    assert caught.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["sage", "--help"])
    lines = [line.split("   ")[0] for line in capsys.readouterr().out.splitlines()]
    examples = [shlex.split(line)[2:] for line in lines if line.startswith("  hf-memeff bench sage")]
    assert len(examples) >= 3
    for words in examples:
        assert parser().parse_args(words).benchmark == "sage"
