"""Config files of needle grids: keys of two classes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.needle_arguments import parse_needles


def write(folder: Path, **keys: object) -> Path:
    path = folder / "needle.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def test_keys_and_words_reach_both_classes(tmp_path: Path) -> None:
    path = write(tmp_path, lengths=[1024], step=4, dense_above=None, max_keep=64)
    words = ["--model", "folder", "--depths", "0.1", "0.5", "--lengths", "1024", "2048", "--dense_above", "0.4"]
    arguments, anchor = parse_needles(path, [*words, "--calibration_tokens", "1000"])
    assert arguments.model_name_or_path == "folder" and arguments.depths == [0.1, 0.5]
    assert arguments.lengths == [1024, 2048] and arguments.calibration_tokens == 1000
    assert (anchor.step, anchor.max_keep, anchor.dense_above, anchor.block_size) == (4, 64, 0.4, 128)


@pytest.mark.parametrize(
    ("keys", "words", "part"),
    [
        ({"stepp": 4}, [], "did you mean 'step'"),
        ({"theta": 12}, [], "'theta'"),
        ({"min_length": 12}, [], "'min_length'"),
        ({}, ["--depth", "0.5"], "'depths'"),
        ({"depths": [0.5, 1.5]}, [], "depths: \\[0.5, 1.5\\]"),
        ({"depths": [n / 20 for n in range(11)]}, [], "up to 10 numbers"),
        ({"lengths": [4096, 4096]}, [], "none twice"),
        ({"lengths": "many"}, [], "lengths"),
        ({"lengths": [2048]}, [], "expected at least 2176"),
        ({"step": 4, "calibration_tokens": 500}, [], "Got 500 .* expected at least 640"),
        ({"step": 0}, [], "step=0"),
        ({"questions": 0}, [], "questions: 0"),
        ({"dtype": "float8"}, [], "float8"),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, object], words: list[str], part: str) -> None:
    with pytest.raises(RecipeError, match=part) as caught:
        parse_needles(write(tmp_path, **keys), words)
    assert "Fix:" in str(caught.value)
