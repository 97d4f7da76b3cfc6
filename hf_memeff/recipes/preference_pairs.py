"""Preference pairs out of GSM8K's model solutions: the worked answer against a solution that came out wrong.

    python -m hf_memeff.recipes.preference_pairs example_model_solutions.jsonl pairs

writes pairs/train.jsonl and pairs/test.jsonl, which `--dataset_name pairs` takes for DPO. The file is the one of
https://github.com/openai/grade-school-math (folder grade_school_math/data), published under the MIT licence with
"Training Verifiers to Solve Math Word Problems", arXiv 2110.14168: per line a question, its worked answer as
"ground_truth", and solutions of four models, each with "solution" and "is_correct".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_memeff.recipes.errors import RecipeError

_TEST_EVERY = 8
"""Each eighth pair is to judge by."""


def read_pairs(path: Path) -> list[dict[str, str]]:
    """The pairs of a file, one per question that any model got wrong.

    Args:
        path: see the module.

    Returns:
        Rows of "prompt", "chosen" (the worked answer) and "rejected" (the first wrong solution), in file order.

    Raises:
        RecipeError: the file is missing, or a line is not one of model solutions, or no model was ever wrong.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        pairs = [pair for row in rows if (pair := _pair(row)) is not None]
    except OSError as error:
        raise RecipeError(
            f"Got no {path} ({error.strerror}), expected GSM8K's example_model_solutions.jsonl. Fix: check the path."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"Got {path} with a line that holds no model solutions ({type(error).__name__}: {error}), expected "
            "question, ground_truth and solutions with is_correct. Fix: fetch the published file again."
        ) from error
    if len(pairs) < 2:
        raise RecipeError(
            f"Got {path} with {len(pairs)} questions that a model got wrong, expected two or more, one to train on and "
            "one to judge by. Fix: use the whole published file."
        )
    return pairs


def _pair(row: dict[str, Any]) -> dict[str, str] | None:
    solutions = [value for value in row.values() if isinstance(value, dict)]
    wrong = next((found["solution"] for found in solutions if not found["is_correct"]), None)
    if wrong is None:
        return None
    return {"prompt": row["question"], "chosen": row["ground_truth"], "rejected": wrong}


def write_pairs(pairs: Sequence[dict[str, str]], folder: Path) -> tuple[int, int]:
    """Write train.jsonl and test.jsonl; the latter gets each eighth pair, and at least the last one.

    Returns:
        How many pairs each has.
    """
    test = pairs[_TEST_EVERY - 1 :: _TEST_EVERY] or pairs[-1:]
    train = [pair for pair in pairs if pair not in test]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
    return len(train), len(test)


def main(words: Sequence[str] | None = None) -> None:
    """Write the pairs of the file that the command line names."""
    parser = argparse.ArgumentParser(description="Make preference pairs out of GSM8K's model solutions.")
    parser.add_argument("solutions", type=Path, help="example_model_solutions.jsonl of GSM8K")
    parser.add_argument("folder", type=Path, help="where train.jsonl and test.jsonl go")
    arguments = parser.parse_args(words)
    try:
        train, test = write_pairs(read_pairs(arguments.solutions), arguments.folder)
    except RecipeError as error:
        sys.exit(f"preference_pairs: {error}")
    print(f"Wrote {train} pairs to train on and {test} to judge by in {arguments.folder}.")


if __name__ == "__main__":
    main()
