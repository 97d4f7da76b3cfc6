"""Example scripts and the commands in their docstrings."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
_MOST_LINES = 80


def example(name: str) -> Path:
    """The script of an example, which is short."""
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= _MOST_LINES
    return script


def commands_of(name: str) -> list[list[str]]:
    """The options of each command that runs an example, from its docstring."""
    text = ast.get_docstring(ast.parse(example(name).read_text(encoding="utf-8"))) or ""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    start = f"python examples/{name}.py"
    return [shlex.split(line[len(start) :]) for line in lines if line.startswith(start)]
