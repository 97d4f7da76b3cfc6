"""Rows of GSM8K and BoolQ: only answers are labelled, long rows are left out, batches depend on the seed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks.sage_text import (
    DataError,
    TokenRow,
    as_prompt,
    drawn_batches,
    in_order,
    labelled_tokens,
    pad,
    read_rows,
    read_texts,
)


def test_question_and_answer_of_both_sets(data: Path) -> None:
    assert read_texts(data, "gsm8k", "train")[1] == ("What is 1 + 3? Think.", "#### 4")
    assert read_texts(data, "gsm8k", "test")[0] == ("What is 500 + 0? Think. Think.", "#### 500")
    assert read_texts(data, "boolq", "train")[1] == ("is 1 odd?", "it is true")


def test_a_model_with_a_chat_template_is_asked_in_it(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_prompt(tokenizer, "Why?") == "Why?\n"
    loop = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", loop + "{% if add_generation_prompt %}<me>{% endif %}")
    assert as_prompt(tokenizer, "Why?") == "<user>Why?<me>"


def test_a_row_is_prompt_answer_and_end_and_long_ones_are_left_out(data: Path, tokenizer: Any) -> None:
    rows = read_rows(data, "gsm8k", "train", tokenizer, 1000)
    assert tokenizer.decode(rows[1].prompt) == "What is 1 + 3? Think.\n"
    assert tokenizer.decode(rows[1].answer[:-1]) == "#### 4"
    assert {row.answer[-1] for row in rows} == {tokenizer.eos_token_id}
    lengths = sorted(map(len, rows))
    short = read_rows(data, "gsm8k", "train", tokenizer, lengths[5])
    assert short == [row for row in rows if len(row) <= lengths[5]]
    assert 6 <= len(short) < len(rows)
    assert read_rows(data, "gsm8k", "train", tokenizer, lengths[5], 4) == short[:4]


def test_padding_is_as_long_as_the_longest_row_and_only_answers_are_labelled() -> None:
    batch = pad([TokenRow((5, 6), (7,)), TokenRow((8,), (9, 10, 11))], 0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 10, 11]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100], [-100, 9, 10, 11]]
    assert labelled_tokens(batch) == 4


def test_drawn_batches_depend_on_the_seed_and_use_every_row_before_one_twice() -> None:
    rows = [TokenRow((i,), (100 + i,)) for i in range(10)]
    first, again, other = (drawn_batches(rows, 0, seed, 4, 3) for seed in (1, 1, 2))
    ids = [torch.cat([batch["input_ids"][:, 0] for batch in batches]).tolist() for batches in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert sorted(ids[0][:10]) == list(range(10))
    assert len(first) == 4 and {len(batch["input_ids"]) for batch in first} == {3}


def test_in_order_is_everything_once() -> None:
    rows = [TokenRow((i,), (100 + i,)) for i in range(5)]
    batches = in_order(rows, 0, 2)
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_what_cannot_be_used_is_said(data: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Got no gsm8k_train\.jsonl"):
        read_texts(tmp_path, "gsm8k", "train")
    (tmp_path / "gsm8k_train.jsonl").write_text('{"question": "no answer"}\n')
    with pytest.raises(DataError, match=r"not one of GSM8K's \(KeyError: 'answer'\)"):
        read_texts(tmp_path, "gsm8k", "train")
    (tmp_path / "boolq_train.json").write_text("[")
    with pytest.raises(DataError, match="not one of BoolQ's"):
        read_texts(tmp_path, "boolq", "train")
    with pytest.raises(DataError, match="Got 24 test rows of at most 1000 tokens in GSM8K, expected 25"):
        read_rows(data, "gsm8k", "test", tokenizer, 1000, 25)
