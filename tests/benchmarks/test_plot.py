"""The picture shows the sweep over length, and is the same for the same results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hf_memeff.benchmarks.plot import plot_results


def test_every_method_of_the_sweep_is_drawn_and_the_bytes_repeat(sweep, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_results(sweep, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for title in ("LoRA", "LoRA + gradient checkpointing", "LoRA + gradient checkpointing + tiled loss", "MeSP"):
        assert f">{title}<" in text
    assert ">MeSP, disk store<" not in text
    assert ">512<" in text and ">1024<" in text
    assert plot_results(sweep, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


def test_without_a_sweep_or_matplotlib_nothing_is_drawn(sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plot_results(sweep[:1], tmp_path / "a.svg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_results(sweep, tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []
