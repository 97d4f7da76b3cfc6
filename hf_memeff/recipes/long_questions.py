"""Questions about a long document: the passage with the answer stands among many others, as in RULER's question tasks.

Source of the form: "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv 2404.06654.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_memeff.benchmarks.anchor_needle import Needle
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.instruction_data import load_rows
from hf_memeff.recipes.training_data import read_dataset

_LEAD = "The answer is"


@dataclass(frozen=True)
class Passage:
    """A piece of a document, and what can be asked about it.

    Attributes:
        text: the piece.
        question: None if nothing is asked about it.
        lead: how the answer starts.
        answer: what follows; it is part of the text.
    """

    text: str
    question: str | None = None
    lead: str = _LEAD
    answer: str = ""


def shipped_passages() -> list[Passage]:
    """The order notes of the package; asked is for the city of goods that a single note is about."""
    rows = [*load_rows("train"), *load_rows("held_out")]
    tickets = [json.loads(row.ticket) for row in rows]
    counts = Counter(ticket["item"] for ticket in tickets)
    return [
        Passage(
            row.note,
            f"To which city do the {ticket['item']} go?" if counts[ticket["item"]] == 1 else None,
            f"The city that the {ticket['item']} go to is",
            ticket["city"],
        )
        for row, ticket in zip(rows, tickets, strict=True)
    ]


def read_passages(name: str, config: str | None, split: str) -> list[Passage]:
    """The passages of a data set in SQuAD's form, each once, with the first question that it answers in its own words.

    Args:
        name: file, folder or Hub id.
        config: configuration of a Hub data set.
        split: of the data set; a single file has one of its own.

    Raises:
        RecipeError: the data set, the split or a column is missing.
    """
    found = read_dataset(name, config)
    split = next(iter(found)) if len(found) == 1 else split
    if split not in found:
        raise RecipeError(
            f"Got split {split!r} of {name}, expected one of {', '.join(found)}. Fix: set dataset_test_split."
        )
    rows = found[split]
    answers = next((column for column in ("answers", "answer") if column in rows.column_names), None)
    if answers is None or not {"context", "question"} <= set(rows.column_names):
        raise RecipeError(
            f"Got columns {', '.join(rows.column_names)} in {name}, expected context, question, and answers or answer. "
            "Fix: name another data set, or rename its columns."
        )
    passages: dict[str, Passage] = {}
    for row in rows:
        text, answer = row["context"], _first(row[answers])
        if passages.get(text, Passage(text)).question is None:
            known = answer is not None and answer in text
            passages[text] = Passage(text, row["question"], _LEAD, str(answer)) if known else Passage(text)
    return list(passages.values())


def _first(answers: Any) -> str | None:
    """The first of several answers, in any of the forms that data sets have."""
    found = answers.get("text") if isinstance(answers, dict) else answers
    found = next(iter(found), None) if isinstance(found, list) else found
    return found if isinstance(found, str) and found else None


def document(passages: Sequence[Passage], questions: int, tokenizer: Any) -> tuple[tuple[Needle, ...], LongText]:
    """Choose passages to ask about; the others are what they are hidden in.

    Args:
        passages: of one data set.
        questions: how many to choose, spread evenly over those with a question.
        tokenizer: of the model.

    Returns:
        The chosen passages as needles, at even depths, and the others as one text.

    Raises:
        RecipeError: fewer passages have a question.
    """
    asked = [passage for passage in passages if passage.question is not None]
    if len(asked) < questions:
        raise RecipeError(
            f"Got questions: {questions}, expected at most {len(asked)}, the passages that have one. "
            "Fix: ask fewer, or name another dataset_name."
        )
    chosen = [asked[len(asked) * index // questions] for index in range(questions)]
    needles = tuple(
        Needle(passage.text, (index + 0.5) / questions, (str(passage.question),), passage.lead, passage.answer)
        for index, passage in enumerate(chosen)
    )
    others = " ".join(passage.text for passage in passages if passage not in chosen)
    ids = tokenizer(others, add_special_tokens=False, verbose=False).input_ids
    return needles, LongText(torch.tensor(ids, dtype=torch.long), 0)
