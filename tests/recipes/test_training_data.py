"""Where rows come from, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_memeff.recipes.arguments import RunArguments
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.model_source import find_smollm2, load_tokenizer
from hf_memeff.recipes.training_data import (
    SHIPPED_NAME,
    RunData,
    in_chat_form,
    load_data,
    token_count,
    with_lengths_checked,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` caches out of the user's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    """Bytes are tokens; no chat template."""
    return load_tokenizer(find_smollm2(str(tiny_folder)))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def data_of(path: Path, rows: list[dict[str, Any]], **arguments: Any) -> RunData:
    return load_data(RunArguments(dataset_name=write(path / "rows.jsonl", rows), **arguments))


def test_the_shipped_rows_fit_both_trainers() -> None:
    sft, dpo = load_data(RunArguments()), load_data(RunArguments(trainer="dpo", dataset_test_rows=3))
    assert sft.record.name == SHIPPED_NAME and sft.test is not None and dpo.test is not None
    assert (sft.record.train_rows, sft.record.test_rows, dpo.record.test_rows) == (320, 48, 3)
    assert sft.train.column_names == ["prompt", "completion"]
    assert dpo.train.column_names == ["prompt", "chosen", "rejected"]
    for right, row in zip(sft.train, dpo.train, strict=True):
        assert row["chosen"] == right["completion"]
        chosen, rejected = json.loads(row["chosen"]), json.loads(row["rejected"])
        assert {name for name in chosen if chosen[name] != rejected[name]} == {"quantity"}


def test_columns_are_renamed_and_others_left_out(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}", "prompt": "old", "id": i} for i in range(5)]
    columns = {"prompt": "question", "completion": "answer"}
    data = data_of(tmp_path, rows, dataset_columns=columns, dataset_train_rows=3)
    assert data.train.to_list() == [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(3)]
    assert data.test is None and data.record.test_split is None
    assert data.record.name == "rows.jsonl"  # and not its path


def test_preferences_may_have_their_prompts_inside(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}]
    data = data_of(tmp_path, [{"chosen": chat, "rejected": chat[:1], "score": 1}], trainer="dpo")
    assert data.train.column_names == ["chosen", "rejected"] and data.train[0]["chosen"] == chat


def test_another_file_and_a_folder_have_the_test_rows(tmp_path: Path) -> None:
    rows = [{"text": "one two"}, {"text": "three"}]
    held_out = write(tmp_path / "held_out.jsonl", rows[:1])
    data = data_of(tmp_path, rows, dataset_test_name=held_out)
    assert data.test is not None and len(data.test) == 1 and data.record.test_split == "held_out.jsonl, train"
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", rows)
    write(folder / "test.jsonl", rows[:1])
    both = load_data(RunArguments(dataset_name=str(folder)))
    assert both.test is not None and (len(both.train), len(both.test)) == (2, 1)


@pytest.mark.parametrize(
    ("rows", "arguments", "parts"),
    [
        ([{"prompt": "a", "completion": 1}], {}, ["column 'completion' of int64", "expected text"]),
        ([{"prompt": "a", "completion": ["b"]}], {}, ["column 'completion'", "list of messages"]),
        ([{"messages": "hello"}], {}, ["column 'messages' of string"]),
        ([{"prompt": "a", "completion": None}], {}, ["'completion'"]),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], {}, ["row 1", "'completion'"]),
        ([{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}], {}, ["all of one kind"]),
        ([{"question": "a"}], {}, ["Got columns question", "prompt and completion", "dataset_columns"]),
        ([{"prompt": "a", "completion": "b"}], {"trainer": "dpo"}, ["prompt and chosen and rejected; or chosen"]),
        ([{"a": "b"}], {"dataset_columns": {"text": "b"}}, ["text: b", "one of a"]),
        ([{"text": "b"}], {"dataset_test_name": "gone.jsonl"}, ["gone.jsonl", "no file"]),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], arguments: Any, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        data_of(tmp_path, rows, **arguments)
    assert all(part in str(caught.value) for part in [*parts, "expected", "Fix:"]), caught.value


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("gone.jsonl", None, "no file"),
        ("./gone", None, "no file"),
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "Got"),
        ("rows.txt", "a", "expected one of .jsonl"),
        ("broken.jsonl", '{"a": ', "cannot load"),
        ("header.csv", "prompt,completion\n", "no data"),
        ("no_owner/no_such_set", None, "cannot load"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_data(RunArguments(dataset_name=name))
    assert all(text in str(caught.value) for text in (part, "expected", "Fix:")), caught.value


def test_a_data_set_without_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).select([]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(RecipeError, match="expected"):
        load_data(RunArguments(dataset_name=str(tmp_path / "rows.parquet")))


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": "a"}])
    with pytest.raises(RecipeError, match=r"Got split 'first' of .*expected one of train"):
        load_data(RunArguments(dataset_name=str(tmp_path), dataset_train_split="first"))


def test_columns_without_a_data_set_are_refused() -> None:
    with pytest.raises(RecipeError, match="without dataset_name"):
        load_data(RunArguments(dataset_columns={"prompt": "question"}))


def test_rows_longer_than_what_is_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "p" * 10, "completion": "c" * n} for n in (5, 30, 9)]
    data = data_of(tmp_path, rows, dataset_test_name=write(tmp_path / "test.jsonl", rows[:1]))

    def checked(long_rows: str, max_length: int | None, context: int | None) -> RunData:
        return with_lengths_checked(data, RunArguments(long_rows=long_rows), tokenizer, max_length, context)

    assert checked("error", 41, 2048) is not data and len(checked("error", 41, 2048).train) == 3
    for max_length, context in ((40, 2048), (40, None), (None, 40)):
        with pytest.raises(RecipeError) as caught:
            checked("error", max_length, context)
        assert "Got 1 of 3 train rows longer than 40 tokens (row 1 has 41)" in str(caught.value)
    dropped = checked("drop", 40, 2048)
    assert [len(text) for text in dropped.train["completion"]] == [5, 9] and dropped.record.train_rows == 2
    assert len(checked("truncate", 40, 2048).train) == 3
    with pytest.raises(RecipeError, match="longer than 40"):
        checked("truncate", None, 40)  # nothing would cut them
    with pytest.raises(RecipeError, match="Got 3 of 3"):
        checked("drop", 4, 2048)
    with pytest.raises(RecipeError, match="at most the 32 tokens that the model reads"):
        checked("truncate", 40, 32)


def test_plain_rows_become_turns_and_are_counted_as_such(tmp_path: Path, tiny_folder: Path) -> None:
    chatting = load_tokenizer(find_smollm2(str(tiny_folder)))
    chatting.chat_template = CHAT_TEMPLATE
    plain = data_of(tmp_path, [{"prompt": "ask\n", "chosen": "yes", "rejected": "no, no"}], trainer="dpo").train
    row = in_chat_form(plain)[0]
    assert row["prompt"] == [{"role": "user", "content": "ask"}]
    assert row["rejected"] == [{"role": "assistant", "content": "no, no"}]
    assert token_count(row, chatting) == len("<user>ask") + 1 + len("<assistant>no, no") + 1
    assert token_count({"messages": row["prompt"] + row["chosen"]}, chatting) == len("<user>ask<assistant>yes") + 2
    whole = {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}
    assert token_count(whole, chatting) == token_count(row, chatting)
    assert in_chat_form(in_chat_form(plain)).to_list() == in_chat_form(plain).to_list()
