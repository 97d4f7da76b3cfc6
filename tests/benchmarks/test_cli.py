"""`hf-memeff bench`: its options, exit statuses and files."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
import torch

from hf_memeff.benchmarks import cli, families
from hf_memeff.benchmarks.results import read_family_results, read_method_results, write_results
from hf_memeff.benchmarks.run import Bench


def never(dtype: torch.dtype | None = None) -> None:
    raise AssertionError("no real weights are asked for")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="hf-memeff bench")
    cli.add_arguments(found)
    return found


def bench(*words: object) -> int:
    return cli.run(parser().parse_args([str(word) for word in words]), never, never)


def test_mesp_measures_writes_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "tiny", "--lengths", 8, 12, "--ranks", 2, "--rounds", 1, "--methods", "lora", "mesp"]
    assert bench("mesp", *words, "--output", tmp_path / "out", "--json", tmp_path / "copy.json") == 0
    results = read_method_results(tmp_path / "out" / "mesp.json")
    assert [(r.tokens, r.method) for r in results] == [(8, "lora"), (8, "mesp"), (12, "lora"), (12, "mesp")]
    assert read_method_results(tmp_path / "copy.json") == results
    assert (tmp_path / "out" / "mesp.svg").stat().st_size > 1000
    captured = capsys.readouterr()
    assert "tiny/fp32/8/r2, tiny/fp32/12/r2" in captured.out
    assert "100%" in captured.err


def test_quick_is_one_case_with_its_own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Bench, "run", lambda self, cases, methods: seen.append((cases, methods)))
    assert bench("mesp", "--quick", "--output", tmp_path) == 0
    ((cases, methods),) = seen
    assert [case.key for case in cases] == ["SmolLM2-135M/fp32/256/r8"]
    assert list(methods) == []


def test_a_failure_is_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bench, "run", lambda self, cases, methods: self.failures.append("a gradient was off"))
    assert bench("mesp", "--quick", "--output", tmp_path) == 1
    assert "hf-memeff bench: a gradient was off" in capsys.readouterr().err


def test_a_foreign_file_in_the_way_is_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mesp.json").write_text("mine")
    assert bench("mesp", "--quick", "--output", tmp_path) == 2
    assert "expected a file of this program" in capsys.readouterr().err
    assert (tmp_path / "mesp.json").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("mesp", "--device", "cuda", "--output", tmp_path) == 2
    assert "got --device cuda without a usable one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["mesp", "--models", "gpt-17"],
        ["mesp", "--lengths", "1"],
        ["mesp", "--ranks", "0"],
        ["mesp", "--ranks", "many"],
        ["mesp", "--dtypes", "int3"],
        ["mesp", "--methods", "magic"],
        ["mesp", "--rounds", "-1"],
    ],
)
def test_values_out_of_range_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench(*words)
    assert caught.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("mesp", "--help")
    lines = [line.split("   ")[0] for line in capsys.readouterr().out.splitlines()]
    examples = [shlex.split(line)[2:] for line in lines if line.startswith("  hf-memeff bench mesp")]
    assert len(examples) >= 3
    for words in examples:
        assert parser().parse_args(words).benchmark == "mesp"


def test_families_writes_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = list(families.measure_families(["LlamaDecoderLayer"]))
    monkeypatch.setattr(cli, "measure_families", lambda: iter(one))
    assert bench("families", "--output", tmp_path) == 0
    assert read_family_results(tmp_path / "families.json") == one
    assert "Llama           structured" in capsys.readouterr().out
    monkeypatch.setattr(cli, "holds", lambda result: False)
    assert bench("families", "--output", tmp_path) == 1


def test_render_and_check(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_memeff.benchmarks import render

    monkeypatch.setattr(cli, "RESULTS_FOLDER", tmp_path)
    write_results(sweep, tmp_path / "mesp.json")
    readme = tmp_path / "README.md"
    readme.write_text("".join(f"<!-- memeff:begin {n} --><!-- memeff:end -->" for n in render.blocks(tmp_path)))
    assert bench("--render", "--check", "--readme", readme) == 1
    assert "Fix: hf-memeff bench --render" in capsys.readouterr().err
    assert bench("--render", "--readme", readme) == 0
    assert bench("--render", "--check", "--readme", readme) == 0
    assert bench("--render", "--readme", tmp_path / "none.md") == 2
    readme.write_text("no marks")
    assert bench("--render", "--readme", readme) == 2


def test_nothing_to_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 2
    assert "expected mesp, families, sage, anchor or --render" in capsys.readouterr().err
