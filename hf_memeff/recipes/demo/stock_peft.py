"""Judge a causal language model on held-out rows, with torch, transformers and stock PEFT alone.

Imported, it is the demo's scoring. Run as a script, it is the demo's proof that a saved adapter needs nothing else: it
loads the adapter in stock PEFT, in a process that never imports this package, and scores it there. Hence no import of
`hf_memeff` in this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100
_LOSS_BATCH_ROWS = 8
"""Rows per forward when only the loss is wanted: whole logits of 24 rows would be the demo's largest tensor."""


@dataclass(frozen=True)
class TokenRow:
    """One row as token ids.

    Attributes:
        prompt: ids of the chat up to where the assistant answers.
        answer: ids of the answer, its end-of-turn token included.
    """

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Scores:
    """What a model does on a list of rows.

    Attributes:
        loss: mean cross-entropy per answer token.
        answers: per row, the ids it answers with (greedy), end-of-turn token and padding removed.
        first_logits: (rows, vocabulary) logits of the first answer token, fp32 on the CPU.
    """

    loss: float
    answers: list[list[int]]
    first_logits: Tensor


def collate(rows: Sequence[TokenRow], pad_id: int) -> dict[str, Tensor]:
    """Pad rows on the right; labels cover the answers only.

    Args:
        rows: N rows, of at most T tokens each.
        pad_id: id to pad with; hidden from attention and loss.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, each (N, T) of int64.
    """
    longest = max(len(row.prompt) + len(row.answer) for row in rows)
    shape = (len(rows), longest)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL)
    for index, row in enumerate(rows):
        end = len(row.prompt) + len(row.answer)
        input_ids[index, :end] = torch.tensor(row.prompt + row.answer)
        attention_mask[index, :end] = 1
        labels[index, len(row.prompt) : end] = torch.tensor(row.answer)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@torch.no_grad()
def score(model: nn.Module, rows: Sequence[TokenRow], pad_id: int, end_ids: Sequence[int]) -> Scores:
    """Loss and greedy answers of a model; it is in eval mode meanwhile and back in its own mode afterwards.

    Args:
        model: a causal language model of transformers, bare or inside PEFT.
        rows: what to judge by.
        pad_id: id to pad with.
        end_ids: ids that end an answer.

    Returns:
        The scores. An answer is cut 4 tokens after the longest expected one: it is wrong by then.
    """
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        loss = _answer_loss(model, rows, pad_id, device)
        width = max(len(row.prompt) for row in rows)
        prompts = torch.full((len(rows), width), pad_id)
        mask = torch.zeros_like(prompts)
        for index, row in enumerate(rows):
            prompts[index, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[index, width - len(row.prompt) :] = 1
        generated: Any = model.generate(
            input_ids=prompts.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(len(row.answer) for row in rows) + 4,
            do_sample=False,
            eos_token_id=list(end_ids),
            pad_token_id=pad_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        model.train(was_training)
    tokens = generated.sequences[:, width:].tolist()
    return Scores(loss, [_until(ids, end_ids) for ids in tokens], generated.logits[0].float().cpu())


def _answer_loss(model: nn.Module, rows: Sequence[TokenRow], pad_id: int, device: torch.device) -> float:
    total = 0.0
    for start in range(0, len(rows), _LOSS_BATCH_ROWS):
        part = rows[start : start + _LOSS_BATCH_ROWS]
        batch = {name: tensor.to(device) for name, tensor in collate(part, pad_id).items()}
        total += model(**batch, use_cache=False).loss.item() * sum(len(row.answer) for row in part)
    return total / sum(len(row.answer) for row in rows)


def _until(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    return ids[: next((index for index, token in enumerate(ids) if token in end_ids), len(ids))]


def main(request_path: str) -> None:
    """Load base model and adapter as ``request_path`` (JSON) says, score the rows, write the scores beside it.

    The request has ``base`` (folder or Hub id), ``adapter`` (folder), ``device``, ``rows``, ``pad_id``, ``end_ids`` and
    ``result`` (file to write). The result has the fields of `Scores` but the logits, which go into
    ``result`` + ".safetensors", and ``foreign_modules``: imported modules that belong to `hf_memeff`.
    """
    import transformers
    from peft import PeftModel
    from safetensors.torch import save_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    base = transformers.AutoModelForCausalLM.from_pretrained(request["base"], dtype=torch.float32, use_safetensors=True)
    model = PeftModel.from_pretrained(base.to(request["device"]), request["adapter"])
    rows = [TokenRow(**row) for row in request["rows"]]
    scores = score(model, rows, request["pad_id"], request["end_ids"])
    foreign = sorted(name for name in sys.modules if name.split(".")[0] == "hf_memeff")
    save_file({"first_logits": scores.first_logits.contiguous()}, request["result"] + ".safetensors")
    with open(request["result"], "w", encoding="utf-8") as file:
        json.dump({"loss": scores.loss, "answers": scores.answers, "foreign_modules": foreign}, file)


if __name__ == "__main__":
    main(sys.argv[1])
