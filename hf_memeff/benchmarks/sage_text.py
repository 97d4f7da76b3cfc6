"""GSM8K and BoolQ as batches of token ids: a question, and an answer that alone is labelled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``labels``, each (B, S) int64."""

_IGNORED = -100


class DataError(ValueError):
    """A data set that cannot be used; the message says what was found and how to go on."""


@dataclass(frozen=True)
class TokenRow:
    """One example.

    Attributes:
        prompt: ids of the question, in the model's chat form.
        answer: ids of the answer and the end token.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class DataSet:
    """Where a data set's rows are, and which of their fields make question and answer.

    Attributes:
        title: for tables.
        train: name of the file to train on.
        test: name of the file to judge by.
        fields: question and answer of a row.
    """

    title: str
    train: str
    test: str
    fields: Callable[[dict[str, str]], tuple[str, str]]


DATA_SETS = {
    "gsm8k": DataSet("GSM8K", "gsm8k_train.jsonl", "gsm8k_test.jsonl", lambda row: (row["question"], row["answer"])),
    "boolq": DataSet(
        "BoolQ",
        "boolq_train.json",
        "boolq_test.json",
        lambda row: ("\n".join(part for part in (row["instruction"], row["input"]) if part), row["output"]),
    ),
}
"""By name. GSM8K is one JSON object per line, BoolQ one list with the fields of instruction tuning."""


def read_texts(folder: Path, name: str, split: str) -> list[tuple[str, str]]:
    """Question and answer of every row of a data set.

    Args:
        folder: where the files are.
        name: key of `DATA_SETS`.
        split: "train" or "test".

    Raises:
        DataError: the file is missing, or is not of its form.
    """
    data = DATA_SETS[name]
    path = folder / (data.train if split == "train" else data.test)
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        return [data.fields(row) for row in rows]
    except OSError as error:
        raise DataError(
            f"Got no {path.name} in {folder} ({error.strerror}), expected {data.train} and {data.test}. "
            "Fix: --data FOLDER with the files in it, or --dataset for another one."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"Got {path} with a row that is not one of {data.title}'s ({type(error).__name__}: {error}), expected "
            "its published fields. Fix: fetch the file again."
        ) from error


def prompt_form(tokenizer: Any) -> str:
    """How questions are put: "chat" where the tokenizer has a template, "line" elsewhere."""
    return "line" if getattr(tokenizer, "chat_template", None) is None else "chat"


def as_prompt(tokenizer: Any, question: str) -> str:
    """A question as the model expects it: a chat up to where the assistant answers, or a line without chat template."""
    if prompt_form(tokenizer) == "line":
        return f"{question}\n"
    message = {"role": "user", "content": question}
    return tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)


def read_rows(
    folder: Path, name: str, split: str, tokenizer: Any, longest: int, count: int | None = None
) -> list[TokenRow]:
    """The rows of a data set that are at most so long, in file order.

    Args:
        folder: where the files are.
        name: key of `DATA_SETS`.
        split: "train" or "test".
        tokenizer: a `PreTrainedTokenizerBase` with an end token.
        longest: most tokens of a row, end token included; longer rows are left out, none is cut.
        count: how many rows to take; None takes all.

    Raises:
        DataError: see `read_texts`; or there are fewer than ``count`` such rows.
    """
    rows: list[TokenRow] = []
    for question, answer in read_texts(folder, name, split):
        if len(rows) == count:
            break
        texts = as_prompt(tokenizer, question), answer
        prompt_ids, answer_ids = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
        row = TokenRow(tuple(prompt_ids), (*answer_ids, tokenizer.eos_token_id))
        if len(row) <= longest:
            rows.append(row)
    if not rows or (count is not None and len(rows) < count):
        raise DataError(
            f"Got {len(rows)} {split} rows of at most {longest} tokens in {DATA_SETS[name].title}, expected "
            f"{count or 'some'}. Fix: use the whole published file."
        )
    return rows


def pad(rows: Sequence[TokenRow], pad_id: int) -> Batch:
    """Put rows together, padded on the right to the longest of them; only answers are labelled."""
    length = max(map(len, rows))
    shape = len(rows), length
    ids = torch.full(shape, pad_id)
    mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, _IGNORED)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row.prompt + row.answer)
        mask[index, : len(row)] = 1
        labels[index, len(row.prompt) : len(row)] = torch.tensor(row.answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def drawn_batches(rows: Sequence[TokenRow], pad_id: int, seed: int, steps: int, rows_per_step: int) -> list[Batch]:
    """The batches of a training run: rows in a random order that depends on the seed alone, over and over if few."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps * rows_per_step:
        order += torch.randperm(len(rows), generator=generator).tolist()
    drawn = [rows[index] for index in order]
    return [pad(drawn[step * rows_per_step : (step + 1) * rows_per_step], pad_id) for step in range(steps)]


def in_order(rows: Sequence[TokenRow], pad_id: int, rows_per_batch: int) -> list[Batch]:
    """All rows, in file order, so many at a time."""
    return [pad(rows[start : start + rows_per_batch], pad_id) for start in range(0, len(rows), rows_per_batch)]


def labelled_tokens(batch: Batch) -> int:
    """Tokens of a batch that are predicted and judged."""
    return int((batch["labels"][:, 1:] != _IGNORED).sum())
