"""The command line: help with examples, version, exit statuses, and what is imported when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_memeff import __version__, cli
from hf_memeff.benchmarks import cli as benchmarks
from hf_memeff.recipes.demo import run as demo_run
from hf_memeff.recipes.demo.options import DemoError, DemoOptions
from hf_memeff.recipes.demo.reload import ReloadError
from hf_memeff.recipes.model_source import ModelUnavailableError


def _help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """Replaces the demo by a function that notes its options and works."""
    seen: list[DemoOptions] = []

    def stand_in(options: DemoOptions, say: object) -> SimpleNamespace:
        seen.append(options)
        return SimpleNamespace(failures=list)

    monkeypatch.setattr(demo_run, "run_demo", stand_in)
    return seen


@pytest.mark.parametrize("words", [[], ["demo"], ["card"], ["bench"]])
def test_help_has_examples_that_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, *words)
    examples = [line.split("   ")[0].split() for line in text.splitlines() if line.startswith("  hf-memeff ")]
    assert examples
    for _, *arguments in (example for example in examples if "--help" not in example):
        assert cli.build_parser(arguments).parse_args(arguments).run is not None


def test_the_demo_is_told_what_the_user_said(demo: list[DemoOptions]) -> None:
    assert cli.main(["demo"]) == 0
    assert demo[0] == DemoOptions()
    words = [
        "--steps",
        "4",
        "--model",
        "m",
        "--method",
        "lora",
        "--device",
        "cpu",
        "--output",
        "o",
        "--json",
        "j",
        "--minutes",
        "3",
    ]
    assert cli.main(["demo", *words]) == 0
    assert demo[1] == DemoOptions(4, "m", "lora", "cpu", Path("o"), Path("j"), 3.0)


@pytest.mark.parametrize("error", [DemoError("bad steps"), ModelUnavailableError("no model"), ReloadError("no load")])
def test_what_stands_in_the_way_is_one_line_and_status_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: DemoOptions, say: object) -> None:
        raise error

    monkeypatch.setattr(demo_run, "run_demo", fail)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == f"hf-memeff: {error}\n"


def test_a_result_that_did_not_hold_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = SimpleNamespace(failures=lambda: ["the loss went up"])
    monkeypatch.setattr(demo_run, "run_demo", lambda options, say: failed)
    assert cli.main(["demo"]) == 1
    assert "the loss went up" in capsys.readouterr().err


def test_a_benchmark_without_its_model_is_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(arguments: object, load_smollm2: Callable[[torch.dtype], object], **others: object) -> None:
        load_smollm2(torch.float32)

    def find() -> None:
        raise ModelUnavailableError("no model")

    monkeypatch.setattr(benchmarks, "run", absent)
    monkeypatch.setattr(cli, "find_smollm2", find)
    assert cli.main(["bench", "mesp"]) == 2
    assert capsys.readouterr().err == "hf-memeff: no model\n"


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: DemoOptions, say: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "run_demo", interrupt)
    assert cli.main(["demo"]) == 130


@pytest.mark.parametrize(
    "words",
    [[], ["nonsense"], ["demo", "--steps", "many"], ["demo", "--method", "full"], ["demo", "--device", "tpu"]],
)
def test_wrong_arguments_are_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: hf-memeff" in capsys.readouterr().err


def test_steps_below_one_are_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--steps", "0", "--output", str(tmp_path / "out")]) == 2
    assert "Got --steps 0, expected at least 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_module_runs_and_the_demo_does_not_import_the_benchmarks(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['hf-memeff', '--version']\n"
        "try:\n    runpy.run_module('hf_memeff.cli', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "from hf_memeff.cli import build_parser\n"
        "build_parser(['demo'])\n"
        "assert 'hf_memeff.benchmarks.cli' not in sys.modules\n"
        "assert 'hf_memeff.recipes.demo.run' not in sys.modules\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"hf-memeff {__version__}\n"
