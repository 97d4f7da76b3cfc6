"""`hf-memeff bench anchor`: its options, exit statuses and files."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

from hf_memeff.benchmarks import anchor_cli, anchor_density, anchor_op, cli
from hf_memeff.benchmarks.anchor_density import PeerPlan, Sample
from hf_memeff.benchmarks.anchor_needle import NEEDLES, NeedlePlan
from hf_memeff.benchmarks.anchor_op import OpPlan
from hf_memeff.benchmarks.anchor_prefill import PrefillPlan
from hf_memeff.benchmarks.anchor_results import HeatResult, NeedleResult, OpResult, PeerResult, PrefillResult
from hf_memeff.benchmarks.anchor_rules import TITLES
from hf_memeff.benchmarks.results import read_results

TOKENS = 600


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="hf-memeff bench")
    cli.add_arguments(found)
    return found


def never(*args: Any) -> None:
    raise AssertionError("nothing is to be loaded")


class _Small:
    """A plan's class with other defaults."""

    def __init__(self, kind: Any, **fields: Any) -> None:
        self.kind, self.fields = kind, fields

    def __call__(self, **fields: Any) -> Any:
        return self.kind(**self.fields | fields)

    def __getattr__(self, name: str) -> Any:
        return self.fields.get(name, getattr(self.kind, name, None))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that suit the tiny model."""
    monkeypatch.setattr(anchor_cli, "OpPlan", _Small(OpPlan, model="tiny"))
    monkeypatch.setattr(anchor_cli, "PrefillPlan", _Small(PrefillPlan, model="tiny", tokens=TOKENS))
    monkeypatch.setattr(anchor_cli, "PeerPlan", _Small(PeerPlan, model="tiny", tokens=TOKENS, rows=24))
    monkeypatch.setattr(anchor_density, "_BISECTIONS", 3)
    monkeypatch.setattr(anchor_cli, "NeedlePlan", _Small(NeedlePlan, model="tiny", needles=NEEDLES[:1]))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 13 kB of text."""
    folder = tmp_path_factory.mktemp("texts")
    words = " ".join(f"word{i * i % 977}" for i in range(1700))
    (folder / "long.txt").write_text(words)
    return folder


def arguments(texts: Path, output: Path, *words: Any) -> argparse.Namespace:
    shared = ["--data", texts, "--calibration-tokens", 2500, "--rounds", 1, "--texts", 2, "--output", output]
    return parser().parse_args([str(word) for word in ["anchor", *shared, *words]])


def test_everything_is_measured_joined_drawn_and_told(
    small: None,
    base: Any,
    tokenizer: Any,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = arguments(texts, tmp_path, "--lengths", TOKENS)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    assert cli.run(own, lambda dtype: base, lambda: tokenizer) == 0
    ops = read_results(OpResult, tmp_path / "anchor_op.json")
    assert {(r.layer, r.setting) for r in ops} == {(layer, name) for layer in (0, 1) for name in anchor_op.SETTINGS}
    for result in ops:
        assert (result.tokens, result.path, result.recall, result.density) == (TOKENS, "short", 1, 1)
        assert len(result.seconds) == len(result.sdpa_seconds) == 1
    (prefill,) = read_results(PrefillResult, tmp_path / "anchor_prefill.json")
    assert prefill.sparse_calls == 0 and abs(prefill.loss_change) < 1e-6 and len(prefill.losses) == 2
    peers = read_results(PeerResult, tmp_path / "anchor_peers.json")
    assert {(r.layer, r.method) for r in peers} == {(layer, method) for layer in (0, 1) for method in TITLES}
    assert len(read_results(NeedleResult, tmp_path / "anchor_needle.json")) == 3
    (heat,) = read_results(HeatResult, tmp_path / "anchor_heat.json")
    assert heat.layer == 1 and len(heat.mass) == len(heat.kept) == heat.cells**2
    for name in ("speed", "density", "heat"):
        assert (tmp_path / f"anchor_{name}.svg").stat().st_size > 1000
    out = capsys.readouterr().out
    assert f"| {TOKENS} | calibrated for 0.95 | 0 to 1 |" in out
    assert "| FlexPrefill |" in out and "needles found at 4096 tokens" in out
    assert all(value.equal(before[name]) for name, value in base.state_dict().items())
    assert base.config._attn_implementation == "sdpa"
    monkeypatch.setattr(Sample, "__init__", never)
    monkeypatch.setattr(base, "forward", never)
    assert cli.run(own, lambda dtype: base, lambda: tokenizer) == 0
    assert capsys.readouterr().out == out


def test_only_runs_the_parts_that_are_named(
    small: None, base: Any, tokenizer: Any, texts: Path, tmp_path: Path
) -> None:
    own = arguments(texts, tmp_path, "--only", "op", "--lengths", 600, "--layers", 1, "--rounds", 0)
    assert cli.run(own, lambda dtype: base, lambda: tokenizer) == 0
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["anchor_op.json"]
    assert {r.layer for r in read_results(OpResult, tmp_path / "anchor_op.json")} == {1}


@pytest.mark.parametrize("part", ["op", "prefill", "peers", "needle"])
def test_too_little_text_is_said_before_a_model_is_loaded(
    part: str, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("word " * 1000)
    own = arguments(tmp_path, tmp_path / "out", "--only", part)
    assert cli.run(own, never, lambda: tokenizer) == 2
    assert "Got a text of 5000 tokens, expected" in capsys.readouterr().err


def test_a_folder_without_text_is_said(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments(tmp_path, tmp_path), never, lambda: tokenizer) == 2
    assert "Got no *.txt file in" in capsys.readouterr().err


def test_a_foreign_calibration_is_refused(
    small: None, base: Any, tokenizer: Any, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "anchor" / "calibration"
    folder.mkdir(parents=True)
    (folder / "positions600-text2500-recall0.95.json").write_text("[]")
    own = arguments(texts, tmp_path, "--only", "op", "--lengths", 600, "--layers", 1)
    assert cli.run(own, lambda dtype: base, lambda: tokenizer) == 2
    assert "with no settings of AnchorAttention" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "speed"],
        ["--lengths", "511"],
        ["--layers", "-1"],
        ["--texts", "0"],
        ["--calibration-tokens", "2048"],
    ],
)
def test_values_out_of_range_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["anchor", *words])
    assert caught.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["anchor", "--help"])
    lines = [line.split("   ")[0] for line in capsys.readouterr().out.splitlines()]
    examples = [shlex.split(line)[2:] for line in lines if line.startswith("  hf-memeff bench anchor")]
    assert len(examples) >= 3
    for words in examples:
        assert parser().parse_args(words).benchmark == "anchor"
