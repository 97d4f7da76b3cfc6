"""The rows of a run: where they come from, and every check that can be made before a model is loaded."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetsError

from hf_memeff.recipes.arguments import RunArguments
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.instruction_data import SYSTEM_PROMPT, InstructionRow, load_rows
from hf_memeff.recipes.results import DataRecord

SHIPPED_NAME = "hf_memeff order tickets"
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("prompt", "completion"), ("messages",), ("text",)),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
}
"""By trainer, the sets of columns that its rows may have."""


@dataclass(frozen=True)
class RunData:
    """Checked rows.

    Attributes:
        train: rows to train on.
        test: rows to judge by; None where there are none.
        record: what they are.
    """

    train: Dataset
    test: Dataset | None
    record: DataRecord


def load_data(run: RunArguments, text_field: str = "text") -> RunData:
    """Find the rows that a run asks for, name their columns as TRL does, and check them.

    Args:
        run: the run's arguments.
        text_field: column of plain texts, as `SFTConfig.dataset_text_field` has it.

    Returns:
        The rows with no other columns than the trainer's, none of them missing.

    Raises:
        RecipeError: a file, data set, split or column is missing; there are no rows; a column holds neither text nor
            messages.
    """
    if run.dataset_name is None:
        if run.dataset_columns or run.dataset_config or run.dataset_test_name:
            raise RecipeError(
                "Got dataset_columns, dataset_config or dataset_test_name without dataset_name, expected them with the "
                "data that they are about. Fix: set dataset_name, or leave them out for the shipped rows."
            )
        found = DatasetDict({"train": _shipped("train", run.trainer), "test": _shipped("held_out", run.trainer)})
        train_split, test_split = "train", "test"
    else:
        found = read_dataset(run.dataset_name, run.dataset_config)
        train_split, test_split = run.dataset_train_split, run.dataset_test_split
        if len(found) == 1 and Path(run.dataset_name).expanduser().is_file():
            train_split = "train"
    if train_split not in found:
        raise _no_split(run.dataset_name, train_split, found)
    train = _checked(found[train_split], run, text_field, train_split, run.dataset_train_rows)
    test = None
    if run.dataset_test_name is not None:
        held_out = read_dataset(run.dataset_test_name, run.dataset_config)
        test_split = next(iter(held_out)) if len(held_out) == 1 else test_split
        if test_split not in held_out:
            raise _no_split(run.dataset_test_name, test_split, held_out)
        test = _checked(held_out[test_split], run, text_field, test_split, run.dataset_test_rows)
        test_split = f"{_public_name(run.dataset_test_name)}, {test_split}"
    elif test_split in found:
        test = _checked(found[test_split], run, text_field, test_split, run.dataset_test_rows)
    record = DataRecord(
        name=_public_name(run.dataset_name),
        config=run.dataset_config,
        train_split=train_split,
        train_rows=len(train),
        test_split=None if test is None else test_split,
        test_rows=0 if test is None else len(test),
    )
    return RunData(train, test, record)


def with_lengths_checked(
    data: RunData, run: RunArguments, tokenizer: Any, max_length: int | None, context: int | None
) -> RunData:
    """See that each row fits into what the trainer keeps and the model can read.

    Args:
        data: from `load_data`.
        run: its ``long_rows`` says what to do with others.
        tokenizer: of the model.
        max_length: where the trainer cuts, in tokens; None if it does not cut.
        context: most tokens that the model reads; None if its config does not say.

    Returns:
        The data, without longer rows where those are to be left out.

    Raises:
        RecipeError: ``max_length`` is more than the model reads, or rows are longer and to be refused, or none is left.
    """
    if max_length is not None and context is not None and max_length > context:
        raise RecipeError(
            f"Got max_length: {max_length}, expected at most the {context} tokens that the model reads. "
            f"Fix: max_length: {context}."
        )
    limit = context if max_length is None else max_length
    if limit is None or (run.long_rows == "truncate" and max_length is not None):
        return data
    train = _fitting(data.train, "train", tokenizer, limit, run)
    test = None if data.test is None else _fitting(data.test, "test", tokenizer, limit, run)
    test_rows = 0 if test is None else len(test)
    return RunData(train, test, dataclasses.replace(data.record, train_rows=len(train), test_rows=test_rows))


def in_chat_form(rows: Dataset) -> Dataset:
    """Plain prompts and answers as turns of a user and an assistant; rows of messages stay as they are."""
    if "prompt" not in rows.column_names or not _is_text(rows, "prompt"):
        return rows
    answers = [name for name in rows.column_names if name != "prompt"]

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        turns = {name: [{"role": "assistant", "content": row[name]}] for name in answers}
        return {"prompt": [{"role": "user", "content": row["prompt"].rstrip("\n")}], **turns}

    return Dataset.from_list([convert(row) for row in rows])


def token_count(row: dict[str, Any], tokenizer: Any) -> int:
    """Length of a row as TRL tokenizes it: the prompt and its longest answer, with the end token or the chat's form."""
    if "messages" in row:
        return len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"])
    answers = [value for name, value in row.items() if name != "prompt"]
    if isinstance(answers[0], list):
        chats = [row.get("prompt", []) + answer for answer in answers]
        return max(len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) for chat in chats)
    texts = [row.get("prompt", "") + text for text in answers]
    return max(len(tokenizer(text).input_ids) + (not text.endswith(tokenizer.eos_token)) for text in texts)


def _fitting(rows: Dataset, split: str, tokenizer: Any, limit: int, run: RunArguments) -> Dataset:
    lengths = [token_count(row, tokenizer) for row in rows]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] <= limit:
        return rows
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    if run.long_rows == "drop" and kept:
        return rows.select(kept)
    raise RecipeError(
        f"Got {len(rows) - len(kept)} of {len(rows)} {split} rows longer than {limit} tokens (row {longest} has "
        f"{lengths[longest]}), expected all to fit into max_length and the model's context. "
        f"Fix: max_length: {lengths[longest]} if the model reads that many, or long_rows: drop or truncate."
    )


def _shipped(name: str, trainer: str) -> Dataset:
    rows = load_rows(name)
    return Dataset.from_list([_preference(row) if trainer == "dpo" else _instruction(row) for row in rows])


def _instruction(row: InstructionRow) -> dict[str, str]:
    return {"prompt": f"{SYSTEM_PROMPT}\n{row.note}\n", "completion": row.ticket}


def _preference(row: InstructionRow) -> dict[str, str]:
    """The right ticket is preferred to one with a quantity that is off by one."""
    wrong = json.loads(row.ticket)
    wrong["quantity"] += 1
    return {"prompt": f"{SYSTEM_PROMPT}\n{row.note}\n", "chosen": row.ticket, "rejected": json.dumps(wrong)}


def read_dataset(name: str, config: str | None) -> DatasetDict:
    """The splits of a file, a folder or a data set on the Hub.

    Args:
        name: path or Hub id.
        config: configuration of a Hub data set.

    Raises:
        RecipeError: there is no such file or data set, or it cannot be read.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix not in _BUILDERS:
                raise RecipeError(
                    f"Got dataset_name: {name}, a {path.suffix or 'nameless'} file, expected one of "
                    f"{', '.join(_BUILDERS)}. Fix: convert it."
                )
            if path.stat().st_size == 0:
                raise RecipeError(f"Got {name}, which is empty, expected rows. Fix: name a file with rows.")
            return datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path))
        if not path.is_dir() and (path.suffix in _BUILDERS or path.is_absolute() or name.startswith((".", "~"))):
            raise RecipeError(
                f"Got dataset_name: {name}, where there is no file, expected a file, a folder or a Hub id. "
                "Fix: check the path, or leave dataset_name out for the shipped rows."
            )
        return datasets.load_dataset(name, config)
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, RecipeError):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecipeError(
            f"Got dataset_name: {name}, which datasets cannot load ({reason}), expected a file or folder of JSON, CSV "
            "or Parquet, or the id of a data set on the Hub that is cached or reachable. Fix: check the spelling and "
            "the connection, dataset_config, or leave dataset_name out for the shipped rows."
        ) from error


def _no_split(name: str | None, split: str, found: DatasetDict) -> RecipeError:
    return RecipeError(
        f"Got split {split!r} of {name}, expected one of {', '.join(found)}. "
        "Fix: set dataset_train_split or dataset_test_split."
    )


def _checked(rows: Dataset, run: RunArguments, text_field: str, split: str, count: int | None) -> Dataset:
    if len(rows) == 0:
        raise RecipeError(f"Got no rows in split {split!r}, expected at least one. Fix: name another file or split.")
    for wanted, given in run.columns.items():
        if given not in rows.column_names:
            raise RecipeError(
                f"Got dataset_columns with {wanted}: {given}, expected one of {', '.join(rows.column_names)}. "
                "Fix: name a column that the data has."
            )
        if wanted != given:
            if wanted in rows.column_names:
                rows = rows.remove_columns(wanted)
            rows = rows.rename_column(given, wanted)
    for columns in _COLUMNS[run.trainer]:
        columns = tuple(text_field if name == "text" else name for name in columns)
        if set(columns) <= set(rows.column_names):
            break
    else:
        expected = "; or ".join(" and ".join(columns) for columns in _COLUMNS[run.trainer])
        raise RecipeError(
            f"Got columns {', '.join(rows.column_names)} in split {split!r}, expected {expected}. "
            "Fix: dataset_columns: {TRL's name: the data's name}."
        )
    rows = rows.select_columns(list(columns))
    if count is not None:
        rows = rows.select(range(min(count, len(rows))))
    kinds = {name: "text" if _is_text(rows, name) else "messages" for name in columns}
    for name in columns:
        if name == "messages" and kinds[name] == "text":
            raise _wrong_type(rows, name, split, "a list of messages with role and content")
        if kinds[name] == "messages" and not _is_messages(rows, name):
            raise _wrong_type(rows, name, split, "text, or a list of messages with role and content")
        for index, value in enumerate(rows[name]):
            if value is None or len(value) == 0:
                raise RecipeError(
                    f"Got row {index} of split {split!r} with nothing in column {name!r}, expected a value in each "
                    "row. Fix: leave such rows out of the data."
                )
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name} of {kind}" for name, kind in kinds.items())
        raise RecipeError(f"Got {mixed} in split {split!r}, expected all of one kind. Fix: make both text.")
    return rows


def _is_text(rows: Dataset, name: str) -> bool:
    return getattr(rows.features[name], "dtype", None) in ("string", "large_string")


def _is_messages(rows: Dataset, name: str) -> bool:
    feature = rows.features[name]
    inner = getattr(feature, "feature", None) or (feature[0] if isinstance(feature, list) and feature else None)
    return isinstance(inner, dict) and {"role", "content"} <= set(inner)


def _wrong_type(rows: Dataset, name: str, split: str, expected: str) -> RecipeError:
    feature = rows.features[name]
    return RecipeError(
        f"Got column {name!r} of {getattr(feature, 'dtype', feature)} in split {split!r}, expected {expected}. "
        "Fix: name another column in dataset_columns, or convert it."
    )


def _public_name(name: str | None) -> str:
    """A Hub id, or the last part of a path."""
    if name is None:
        return SHIPPED_NAME
    path = Path(name).expanduser()
    return path.name if path.exists() else name
