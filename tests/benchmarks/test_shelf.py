"""One file per result: complete at any time, found again by name, refused if it is something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_memeff.benchmarks.results import ResultsError, read_results
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult
from hf_memeff.benchmarks.shelf import Shelf, joined


def test_every_kind_comes_back_as_it_was(learning, steps, cosines, tmp_path: Path) -> None:
    for kind, results in ((LearningResult, learning), (StepResult, steps), (CosineResult, cosines)):
        shelf = Shelf(kind, tmp_path / kind.__name__)
        assert shelf.all() == []
        for result in results:
            assert shelf.find(result.key) is None
            shelf.add(result)
            assert shelf.find(result.key) == result
        assert sorted(shelf.all(), key=lambda r: r.key) == sorted(results, key=lambda r: r.key)
        joined(shelf.all(), tmp_path / "joined.json")
        assert read_results(kind, tmp_path / "joined.json") == shelf.all()


def test_another_result_takes_the_place_of_one_with_its_name(learning, tmp_path: Path) -> None:
    shelf = Shelf(LearningResult, tmp_path)
    shelf.add(learning[0])
    shelf.add(replace(learning[0], test_loss=3.0))
    assert [result.test_loss for result in shelf.all()] == [3.0]


def test_half_a_file_or_a_wrong_one_is_refused(learning, steps, tmp_path: Path) -> None:
    shelf = Shelf(LearningResult, tmp_path)
    shelf.add(learning[0])
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "gsm8k-mesp-seed0.json")
    with pytest.raises(ResultsError, match="with the results gsm8k-base-seed0, expected gsm8k-mesp-seed0 alone"):
        shelf.find("gsm8k-mesp-seed0")
    (tmp_path / "gsm8k-mesp-seed0.json").write_text('{"format": 1, "results": [')
    with pytest.raises(ResultsError, match="no JSON"):
        shelf.all()
    Shelf(StepResult, tmp_path).add(steps[0])
    with pytest.raises(ResultsError, match="an entry that is no LearningResult"):
        shelf.find(steps[0].key)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(LearningResult, tmp_path)
    shelf.add(learning[0])

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        shelf.add(replace(learning[0], test_loss=3.0))
    assert shelf.all() == [learning[0]]
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_joined_to_no_file(tmp_path: Path) -> None:
    joined([], tmp_path / "joined.json")
    assert list(tmp_path.iterdir()) == []
