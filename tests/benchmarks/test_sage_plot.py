"""The pictures show every method that was measured, and are the same for the same results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks.conftest import learnt, pointing
from hf_memeff.benchmarks.sage_methods import SALIENCIES
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


def test_every_saliency_can_be_drawn(learning, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [pointing(name, 0.25, (0.4, 0.5)) for name in SALIENCIES]
    assert plot_cosines(found, tmp_path / "a.svg")
    runs = [*learning, *(learnt(f"sage-{name}", 0, 1.3, 0.25) for name in SALIENCIES)]
    assert plot_learning(runs, "gsm8k", tmp_path / "b.svg")
    for name in SALIENCIES:
        for picture in ("a.svg", "b.svg"):
            assert f">SAGE, {name.replace('_', ' ')}<" in (tmp_path / picture).read_text()


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
