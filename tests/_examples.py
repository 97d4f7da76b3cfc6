"""What tests of the example scripts share: their commands, and running one in this process."""

from __future__ import annotations

import ast
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from hf_memeff.recipes.model_source import ModelUnavailableError, find_smollm2

FOLDER = Path(__file__).parents[1] / "examples"


def commands(name: str) -> list[list[str]]:
    """The words behind `python examples/NAME.py` in every command of a script's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    lines = text.replace("\\\n", " ").splitlines()
    start = f"python examples/{name}.py"
    return [shlex.split(line.strip().removeprefix(start)) for line in lines if line.strip().startswith(start)]


def run_small(
    name: str, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """Run a script as its first command does, with another output folder; returns what it printed."""
    try:
        find_smollm2(allow_download=False)
    except ModelUnavailableError:
        pytest.skip("SmolLM2 is not on this machine")
    script = FOLDER / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--output_dir", str(output), *words])
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out
