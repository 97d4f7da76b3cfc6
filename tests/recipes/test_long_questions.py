"""Documents out of passages: what is asked, where its answer is, and what data sets are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers

from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.long_questions import Passage, document, read_passages, shipped_passages


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    datasets.disable_progress_bars()
    return transformers.AutoTokenizer.from_pretrained(tiny_folder)


def test_shipped_questions_have_one_answer() -> None:
    passages = shipped_passages()
    asked = [passage for passage in passages if passage.question is not None]
    assert len(passages) == 368 and len(asked) > 100
    for passage in asked:
        item = passage.lead.removeprefix("The city that the ").removesuffix(" go to is")
        assert item in passage.question and passage.answer not in passage.question
        assert [other for other in passages if item in other.text] == [passage]
        assert passage.answer in passage.text


def test_a_document_is_all_passages_in_two_parts(tokenizer: Any) -> None:
    passages = [Passage(f"Text {n}.", f"What is {n}?", answer=str(n)) for n in range(5)] + [Passage("Rest.")]
    needles, text = document(passages, 2, tokenizer)
    assert [(n.fact, n.depth, n.questions, n.lead, n.answer) for n in needles] == [
        ("Text 0.", 0.25, ("What is 0?",), "The answer is", "0"),
        ("Text 2.", 0.75, ("What is 2?",), "The answer is", "2"),
    ]
    assert tokenizer.decode(text.ids) == "Text 1. Text 3. Text 4. Rest."
    assert text.measured(len(text.ids)).shape == (1, len(text.ids))
    with pytest.raises(RecipeError, match="questions: 6, expected at most 5"):
        document(passages, 6, tokenizer)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_squad_s_form(tmp_path: Path) -> None:
    row = {"context": "Ann has a cat.", "question": "What has Ann?"}
    name = write(
        tmp_path / "squad.jsonl",
        {**row, "answers": {"text": ["a dog"], "answer_start": [0]}},
        {**row, "answers": {"text": ["a cat", "cat"], "answer_start": [8, 10]}},
        {**row, "question": "Who?", "answers": {"text": ["Ann"], "answer_start": [0]}},
        {"context": "Bob.", "question": "Why?", "answers": {"text": [], "answer_start": []}},
    )
    assert read_passages(name, None, "validation") == [
        Passage("Ann has a cat.", "What has Ann?", answer="a cat"),
        Passage("Bob."),
    ]


@pytest.mark.parametrize("answer", [["a cat"], "a cat"])
def test_other_forms_of_answers(tmp_path: Path, answer: Any) -> None:
    name = write(tmp_path / "rows.jsonl", {"context": "Ann has a cat.", "question": "What?", "answer": answer})
    assert read_passages(name, None, "train")[0].answer == "a cat"


def test_what_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl", {"text": "Ann has a cat."})
    with pytest.raises(RecipeError, match="Got columns text"):
        read_passages(name, None, "train")
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", {"context": "a", "question": "b", "answer": "a"})
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"'validation'.*train, test"):
        read_passages(str(tmp_path), None, "validation")
