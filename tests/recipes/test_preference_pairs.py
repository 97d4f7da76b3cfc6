"""Preference pairs out of model solutions: which is chosen, which is rejected, where they go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.preference_pairs import main, read_pairs, write_pairs
from hf_memeff.recipes.training_data import read_dataset


def row(number: int, *right: bool) -> dict[str, Any]:
    solutions = {f"model{i}": {"is_correct": is_right, "solution": f"s{number}{i}"} for i, is_right in enumerate(right)}
    return {"question": f"q{number}", "ground_truth": f"a{number}", **solutions}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(found) + "\n" for found in rows), encoding="utf-8")
    return path


def test_the_worked_answer_is_chosen_and_the_first_wrong_one_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "solutions.jsonl", row(0, True, False, False), row(1, True), row(2, False))
    assert read_pairs(path) == [
        {"prompt": "q0", "chosen": "a0", "rejected": "s01"},
        {"prompt": "q2", "chosen": "a2", "rejected": "s20"},
    ]


def test_each_eighth_pair_is_to_judge_by_and_the_folder_is_a_data_set(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    path = write(tmp_path / "solutions.jsonl", *(row(number, False) for number in range(20)))
    main([str(path), str(tmp_path / "pairs")])
    found = read_dataset(str(tmp_path / "pairs"), None)
    assert found["test"]["prompt"][:] == ["q7", "q15"] and len(found["train"]) == 18
    assert set(found["train"].column_names) == {"prompt", "chosen", "rejected"}
    assert write_pairs(read_pairs(path)[:2], tmp_path / "two") == (1, 1)


@pytest.mark.parametrize(
    ("text", "part"),
    [(None, "Got no"), ('{"question": "q"}\n', "0 questions"), ("[1]\n", "no model solutions"), ("{\n", "no model")],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str | None, part: str) -> None:
    path = tmp_path / "solutions.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=part):
        read_pairs(path)
    with pytest.raises(SystemExit, match="preference_pairs: Got"):
        main([str(path), str(tmp_path / "pairs")])
