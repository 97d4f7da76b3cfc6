"""The pictures show every method that was measured, and are the same for the same results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hf_memeff.benchmarks.sage_plot import plot_cosines, plot_learning


def test_what_was_learnt_against_time_and_memory(learning, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_learning(learning, "gsm8k", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("LoRA", "SAGE, gradient", "SAGE, attention", "SAGE, random", "CPU seconds a step"):
        assert f">{words}<" in text
    assert ">peak above weights and gradients, MiB<" in text
    assert ">MeSP<" not in text
    assert plot_learning(learning, "gsm8k", tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


def test_cosines_against_the_budget(cosines, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_cosines(cosines, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("SAGE, attention", "SAGE, gradient", "token budget, random B", "token budget, after training"):
        assert f">{words}<" in text
    assert ">SAGE, random<" not in text
    assert plot_cosines([c for c in cosines if c.adapter == "random"], tmp_path / "b.svg")
    assert "after training" not in (tmp_path / "b.svg").read_text()


def test_without_results_or_matplotlib_nothing_is_drawn(
    learning, cosines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plot_learning(learning, "boolq", tmp_path / "a.svg")
    assert not plot_learning(learning[:1], "gsm8k", tmp_path / "a.svg")
    assert not plot_cosines([], tmp_path / "a.svg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_learning(learning, "gsm8k", tmp_path / "a.svg")
    assert not plot_cosines(cosines, tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []
