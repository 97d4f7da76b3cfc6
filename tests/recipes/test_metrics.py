"""The metrics on answers worked out by hand, without a connection."""

from __future__ import annotations

import evaluate
import pytest

from helpers import forbid_network
from hf_memeff.recipes.arguments import METRICS
from hf_memeff.recipes.metrics import METRIC_CLASSES, final_number, score


def test_they_are_metrics_of_evaluate_and_all_can_be_asked_for() -> None:
    assert tuple(METRIC_CLASSES) == METRICS
    assert all(issubclass(kind, evaluate.Metric) for kind in METRIC_CLASSES.values())


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        ("exact_match", ["a b ", "a  b", "A b", ""], ["a b", "a b", "a b", ""], 0.5),
        (
            "final_number",
            ["so 7", "#### 1,000\n", "12 then 8", "none"],
            ["x\n#### 7.0", "#### 1000", "#### 12", "1"],
            0.5,
        ),
        (
            "choice_accuracy",
            ["True, not false", "I say FALSE.", "untrue", "the correct answer is true"],
            ["the correct answer is true", "the correct answer is true", "it is true", "it is true"],
            0.5,
        ),
    ],
)
def test_shares_of_right_answers(name: str, predictions: list[str], references: list[str], expected: float) -> None:
    with forbid_network():
        assert score(name, predictions, references) == expected


def test_a_choice_counts_only_if_it_is_the_first_named() -> None:
    references = ["answer is answer1", "answer is answer2"]
    assert score("choice_accuracy", ["answer2 or answer1", "answer2 or answer1"], references) == 0.5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has $1,200.50 left.", 1200.5),
        ("3 + 4 = 7\n#### 7", 7),
        ("#### 5 apples, not 6", 5),
        ("first #### 1, then #### -2", -2),
        ("9 apples ####", None),
        ("none at all", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number
