"""The example of needles and long documents: its commands parse, its small version fills every cell."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from _examples import FOLDER, commands, run_small
from hf_memeff.benchmarks.anchor_needle import METHODS
from hf_memeff.recipes.needle_arguments import parse_needles


def test_every_command_parses() -> None:
    found = commands("anchor_needle")
    assert len(found) == 2 and found[0] == []
    small, full = (parse_needles(FOLDER / "anchor_needle.yaml", words) for words in found)
    assert small[0].lengths == [2048, 3072] and small[1].step == 4
    assert max(full[0].lengths) == 131072 and len(full[0].depths) == 10 and full[1].step == 16


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_small_version_on_the_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_small("anchor_needle", tmp_path, monkeypatch, capsys)
    for name, lengths in (("needles", [2048, 3072]), ("questions", [2048])):
        results = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["results"]
        assert [(r["tokens"], r["method"]) for r in results] == [(n, m) for n in lengths for m in METHODS]
        for result in results:
            assert len(result["answers"]) == len(result["answer_losses"]) == 2
            assert all(math.isfinite(loss) and loss > 0 for loss in result["answer_losses"])
            if result["method"] == "anchor":
                assert all(0 < density < 1 for density in result["densities"]) and min(result["sparse_calls"]) > 0
        losses = {
            m: statistics.fmean(x for r in results if r["method"] == m for x in r["answer_losses"]) for m in METHODS
        }
        # what was dropped is nothing that the answers needed
        assert losses["anchor"] == pytest.approx(losses["dense"], rel=0.2, abs=0.2)
        if name == "needles":  # which first keys and window alone do not find
            assert losses["sinks-window"] > losses["anchor"] + 0.3
    assert out.count("| AnchorAttention, calibrated") == 3
