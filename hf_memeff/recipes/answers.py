"""A model's own answers to the prompts of a data set, for metrics that read answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset

from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.metrics import score

_SLACK_TOKENS = 8
"""How much longer than the longest expected answer a generated one may be: by then it is wrong for any exact metric."""


def require_answers(rows: Dataset | None, metrics: Sequence[str]) -> None:
    """Refuse metrics that the rows have no prompts and expected answers for.

    Args:
        rows: rows to judge by.
        metrics: names of metrics.

    Raises:
        RecipeError: there are metrics, but no rows or only whole texts.
    """
    if not metrics:
        return
    if rows is None:
        raise RecipeError(
            f"Got metrics: {', '.join(metrics)} without rows to judge by, expected a test split. "
            "Fix: set dataset_test_split or dataset_test_name, or leave metrics out."
        )
    if "prompt" not in rows.column_names:
        raise RecipeError(
            f"Got metrics: {', '.join(metrics)} for rows of {', '.join(rows.column_names)}, expected a prompt and an "
            "answer to compare with. Fix: give the data as prompt and completion, or leave metrics out."
        )


def judge(
    model: Any, tokenizer: Any, rows: Dataset, metrics: Sequence[str], batch_rows: int, max_new_tokens: int | None
) -> dict[str, float]:
    """Let a model answer each prompt, greedily, and score the answers.

    Args:
        model: a causal language model, bare or with an adapter, on its device; its mode is kept.
        tokenizer: of the model, with a padding token.
        rows: ``prompt`` and ``completion``, or ``prompt`` and ``chosen``, text or messages.
        metrics: names of metrics.
        batch_rows: rows to generate at once.
        max_new_tokens: longest answer; None: the longest expected one and 8 tokens more.

    Returns:
        Values by metric.
    """
    answer_column = "completion" if "completion" in rows.column_names else "chosen"
    references = [_text(answer) for answer in rows[answer_column]]
    if max_new_tokens is None:
        max_new_tokens = max(len(tokenizer(text).input_ids) for text in references) + _SLACK_TOKENS
    predictions: list[str] = []
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(rows), batch_rows):
            predictions += _answers(model, tokenizer, rows["prompt"][start : start + batch_rows], max_new_tokens)
    finally:
        model.train(was_training)
    return {name: score(name, predictions, references) for name in metrics}


@torch.no_grad()
def _answers(model: Any, tokenizer: Any, prompts: Sequence[Any], max_new_tokens: int) -> list[str]:
    ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    width = max(map(len, ids))
    device = next(model.parameters()).device
    # padded by hand on the left, whatever side the tokenizer is set to for training
    tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
    generated = model.generate(
        input_ids=tokens,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,  # training switches it off
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=_end_ids(model, tokenizer),
    )
    return tokenizer.batch_decode(generated[:, width:], skip_special_tokens=True)


def _prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the tokenizer's, and those that the model's generation config names."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *(token for token in listed if token is not None)})


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer[-1]["content"])
