"""Metrics of generated answers, as `evaluate.Metric` classes that come with the package: no script is downloaded.

Example:
    ```python
    FinalNumber(keep_in_memory=True).compute(predictions=["so 3 + 4 = 7"], references=["... #### 7"])
    # {"final_number": 1.0}
    ```
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import evaluate
from datasets import Features, Value

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_MARK = "####"


class _AnswerMetric(evaluate.Metric):
    """A share of right answers, of one prediction and one reference per row."""

    summary = ""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.summary,
            citation="",
            inputs_description="predictions, references: one text per row",
            features=Features({"predictions": Value("string"), "references": Value("string")}),
        )


class ExactMatch(_AnswerMetric):
    """Share of predictions that are the reference, blanks at both ends aside."""

    summary = "Share of predictions that equal their reference."

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        right = [p.strip() == r.strip() for p, r in zip(predictions, references, strict=True)]
        return {"exact_match": sum(right) / len(right)}


class FinalNumber(_AnswerMetric):
    """Share of predictions whose final number is the reference's, as GSM8K is judged.

    A text's final number is the first one behind its last ``####``, or the last one without that mark. Thousands
    separators, a dollar sign and zeros behind the point make no difference. A reference without a number counts as
    wrong. Source: "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
    """

    summary = "Share of predictions whose final number is the reference's."

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        pairs = [(final_number(p), final_number(r)) for p, r in zip(predictions, references, strict=True)]
        return {"final_number": sum(p is not None and p == r for p, r in pairs) / len(pairs)}


class ChoiceAccuracy(_AnswerMetric):
    """Share of predictions that name the reference's choice before any other.

    The choices are the distinct last words of all references, such as "true" and "false" or "answer1" to "answer4" in
    "the correct answer is answer2"; case and punctuation make no difference. A prediction that names none is wrong.
    Source: the evaluation of LLM-Adapters, arXiv 2304.01933, which takes the first choice that an answer names.
    """

    summary = "Share of predictions that name the reference's choice before any other."

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        expected = [next(iter(_words(reference)[-1:]), None) for reference in references]
        choices = {choice for choice in expected if choice is not None}
        named = [next((word for word in _words(text) if word in choices), None) for text in predictions]
        right = [n is not None and n == e for n, e in zip(named, expected, strict=True)]
        return {"choice_accuracy": sum(right) / len(right)}


METRIC_CLASSES: dict[str, type[Any]] = {
    "exact_match": ExactMatch,
    "final_number": FinalNumber,
    "choice_accuracy": ChoiceAccuracy,
}


def final_number(text: str) -> float | None:
    """The number that a worked solution ends in; None if it has none."""
    _, mark, behind = text.rpartition(_MARK)
    found = _NUMBER.findall(behind)
    if not found:
        return None
    return float((found[0] if mark else found[-1]).replace(",", "").replace("$", ""))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def score(name: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    """One metric's value.

    Args:
        name: key of `METRIC_CLASSES`.
        predictions: what the model answered, at least one.
        references: what was expected, as many.
    """
    metric = METRIC_CLASSES[name](keep_in_memory=True)
    return float(metric.compute(predictions=list(predictions), references=list(references))[name])
