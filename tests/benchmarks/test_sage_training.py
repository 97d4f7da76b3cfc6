"""Training is AdamW as Trainer sets it up; the held-out loss is per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_memeff.benchmarks.sage_methods import LORA, make_model
from hf_memeff.benchmarks.sage_text import drawn_batches, in_order, read_rows
from hf_memeff.benchmarks.sage_training import Training, held_out_loss


def test_the_loss_is_per_token_whatever_the_batches(data: Path, base: Any, tokenizer: Any) -> None:
    rows = read_rows(data, "gsm8k", "test", tokenizer, 160, 8)
    one, many = held_out_loss(base, in_order(rows, 0, 8)), held_out_loss(base, in_order(rows, 0, 3))
    assert one == pytest.approx(many, rel=1e-5)


def test_a_training_is_adamw_with_warm_up_and_decay(data: Path, base: Any, tokenizer: Any) -> None:
    batch = drawn_batches(read_rows(data, "gsm8k", "train", tokenizer, 160), 0, 0, 1, 4)[0]
    model = make_model(LORA, base, rank=2, seed=0)
    training = Training(model, 1.0, 10)
    rates = []
    for _ in range(10):
        rates.append(training._schedule.get_last_lr()[0])
        training._update(batch)
    assert rates == pytest.approx([0.0, 1.0, *(1 - i / 9 for i in range(1, 9))])
    assert training.tenths() == tuple(training.losses)
