"""Collating, scoring and greedy answers, against the plain definition row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_memeff.recipes.demo.stock_peft import IGNORED_LABEL, TokenRow, answer_loss, collate, greedy_answers
from hf_memeff.recipes.model_source import find_smollm2, load_model

ROWS = [TokenRow([5, 6, 7], [8, 9, 0]), TokenRow([10, 11, 12, 13, 14], [15, 0]), TokenRow([20], [21, 22, 23, 24, 0])]


@pytest.fixture
def model(tiny_folder: Path):
    return load_model(find_smollm2(str(tiny_folder)))


def test_collate_labels_the_answers_only() -> None:
    batch = collate(ROWS[:2], pad_id=99)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 99], [10, 11, 12, 13, 14, 15, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0], [1] * 7]
    assert batch["labels"].tolist() == [[IGNORED_LABEL] * 3 + [8, 9, 0, IGNORED_LABEL], [IGNORED_LABEL] * 5 + [15, 0]]


def test_answer_loss_is_the_mean_over_answer_tokens_of_all_batches(model) -> None:
    rows = ROWS * 4  # more than one batch, of unequal token counts
    loss, first_logits = answer_loss(model, rows, pad_id=0)
    losses = []
    for index, row in enumerate(rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.prompt + row.answer])).logits[0]
        start = len(row.prompt) - 1
        losses.append(F.cross_entropy(logits[start:-1], torch.tensor(row.answer), reduction="none"))
        torch.testing.assert_close(first_logits[index], logits[start], rtol=1e-5, atol=1e-5)
    assert loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_greedy_answers_do_not_depend_on_the_other_rows(model) -> None:
    together = greedy_answers(model, ROWS, pad_id=0, end_ids=[0])
    longest = max(len(row.answer) for row in ROWS)
    for row, answer in zip(ROWS, together, strict=True):
        ids = torch.tensor([row.prompt])
        for _ in range(longest + 4):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        expected = ids[0, len(row.prompt) :].tolist()
        assert answer == (expected[: expected.index(0)] if 0 in expected else expected)


def test_an_answer_ends_before_the_first_end_token(model) -> None:
    free = greedy_answers(model, ROWS, pad_id=0, end_ids=[300])
    stopper = free[0][2]
    stopped = greedy_answers(model, ROWS, pad_id=0, end_ids=[300, stopper])
    assert stopped[0] == free[0][: free[0].index(stopper)]
