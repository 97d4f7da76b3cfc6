"""Needles and questions on a tiny model: every cell each way, once; figures' shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hf_memeff.benchmarks.anchor_needle import METHODS, Needles
from hf_memeff.recipes import needle_grid
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.needle_grid import GridResults, grid_table, run_needles

SMALL = {
    "lengths": [500, 600],
    "depths": [0.25, 0.75],
    "question_lengths": [500],
    "questions": 3,
    "calibration_tokens": 400,
    "answer_tokens": 2,
    "block_size": 16,
    "step": 4,
    "dense_above": 1,  # random weights attend to all keys alike, so that no threshold leaves any out
    "use_cpu": True,
}


class Grid:
    """Writes a config for the tiny model and runs it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def __call__(self, *words: str, **keys: object) -> GridResults:
        path = self.folder / "needle.yaml"
        where = {"model_name_or_path": str(self.model), "output_dir": str(self.folder / "out")}
        path.write_text(yaml.safe_dump({**SMALL, **where, **keys}), encoding="utf-8")
        return run_needles(path, words, say=lambda line: None)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Grid:
    return Grid(tmp_path_factory.mktemp("grid"), tiny_folder)


@pytest.fixture(scope="module")
def found(grid: Grid) -> GridResults:
    return grid()


def test_every_cell_is_asked_each_way(found: GridResults) -> None:
    assert [(r.tokens, r.method) for r in found.needles] == [(n, m) for n in (500, 600) for m in METHODS]
    assert [(r.tokens, r.method) for r in found.questions] == [(500, m) for m in METHODS]
    assert all(r.depths == (0.25, 0.75) and len(r.answers) == 2 for r in found.needles)
    assert all(len(r.questions) == 3 and r.depths == (1 / 6, 0.5, 5 / 6) for r in found.questions)
    for results in (found.needles, found.questions):
        for result in results:
            assert all(loss > 0 for loss in result.answer_losses)
            if result.method == "dense":
                assert set(result.densities) == {1.0} and set(result.sparse_calls) == {0}
            else:
                assert result.step == 4 and min(result.sparse_calls) > 0
                least = 0.9 if result.method == "anchor" else 0.0
                assert all(least <= density <= least + 0.1 for density in result.densities)
    by_method = {(r.tokens, r.method): r for r in found.needles}
    for tokens in (500, 600):
        dense, anchor = by_method[tokens, "dense"], by_method[tokens, "anchor"]
        assert anchor.answer_losses == pytest.approx(dense.answer_losses, abs=0.2)
        assert anchor.calibration_tokens == 400


def test_files_hold_what_is_returned(grid: Grid, found: GridResults) -> None:
    assert found.paths == (grid.folder / "out" / "needles.json", grid.folder / "out" / "questions.json")
    for path, results in zip(found.paths, (found.needles, found.questions), strict=True):
        text = path.read_text(encoding="utf-8")
        assert [entry["answer_losses"] for entry in json.loads(text)["results"]] == [
            list(result.answer_losses) for result in results
        ]
        assert str(grid.folder) not in text


def test_what_is_there_is_not_asked_again(grid: Grid, found: GridResults, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []
    whole = Needles._ask_all

    def counted(self: Needles, tokens: int, method: str) -> None:
        asked.append((tokens, method))
        whole(self, tokens, method)

    monkeypatch.setattr(Needles, "_ask_all", counted)
    assert grid("--lengths", "600") == GridResults(found.needles[3:], found.questions, found.paths)
    assert asked == []
    changed = grid("--lengths", "500", "--depths", "0.5")
    assert asked == [(500, method) for method in METHODS] and changed.needles[0].depths == (0.5,)


def test_the_table(found: GridResults) -> None:
    lines = grid_table(found.needles, ["at 0.25", "at 0.75"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["tokens", "attention", "at 0.25", "at 0.75", "density"]
    assert len(cells) == 2 + 6 and cells[2][:2] == ["500", "dense (sdpa)"] and cells[2][4] == "-"
    assert cells[4][1] == "sinks + window" and cells[4][4] == "0.000"
    assert f"({found.needles[0].answer_losses[0]:.2f})" in cells[2][2]


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"lengths": [10**7]}, "lengths: 10000000, expected at most .*text with more text"),
        ({"question_lengths": [10**6]}, "question_lengths: 1000000, expected at most"),
        ({"questions": 400}, "questions: 400, expected at most"),
        ({"dataset_name": "gone.jsonl"}, "gone.jsonl"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_loads(
    grid: Grid, monkeypatch: pytest.MonkeyPatch, keys: dict[str, object], part: str
) -> None:
    monkeypatch.setattr(needle_grid, "load_model", lambda *args: pytest.fail("weights were loaded"))
    with pytest.raises(RecipeError, match=part):
        grid(**keys)
