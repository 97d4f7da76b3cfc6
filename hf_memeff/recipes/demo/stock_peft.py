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
def answer_loss(model: nn.Module, rows: Sequence[TokenRow], pad_id: int) -> tuple[float, Tensor]:
    """Loss on the answers, and the logits from which an answer starts.

    Args:
        model: a causal language model of transformers, bare or inside PEFT, in eval mode.
        rows: what to judge by.
        pad_id: id to pad with.

    Returns:
        Mean cross-entropy per answer token, and the (rows, vocabulary) logits of the first one, fp32 on the CPU.
    """
    device = next(model.parameters()).device
    total, logits = 0.0, []
    for start in range(0, len(rows), _LOSS_BATCH_ROWS):
        part = rows[start : start + _LOSS_BATCH_ROWS]
        batch = {name: tensor.to(device) for name, tensor in collate(part, pad_id).items()}
        outputs = model(**batch, use_cache=False)
        total += outputs.loss.item() * sum(len(row.answer) for row in part)
        # copies: a view would keep the batch's logits of all positions until the end
        logits += [outputs.logits[index, len(row.prompt) - 1].to("cpu", copy=True) for index, row in enumerate(part)]
        del outputs  # else the next batch's logits come on top
    return total / sum(len(row.answer) for row in rows), torch.stack(logits).float()


@torch.no_grad()
def greedy_answers(model: nn.Module, rows: Sequence[TokenRow], pad_id: int, end_ids: Sequence[int]) -> list[list[int]]:
    """What a model answers to each prompt, in one batch.

    Args:
        model: as for `answer_loss`.
        rows: only their prompts are shown to the model.
        pad_id: id to pad with.
        end_ids: ids that end an answer.

    Returns:
        Per row, the ids of the answer without end and padding. It is cut 4 tokens after the longest expected answer,
        since it is wrong by then.
    """
    device = next(model.parameters()).device
    width = max(len(row.prompt) for row in rows)
    prompts = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(prompts)
    for index, row in enumerate(rows):
        prompts[index, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[index, width - len(row.prompt) :] = 1
    threads = torch.get_num_threads()
    # Decoding is thousands of tiny operations, at each of which threads wait for each other: on two busy cores two
    # threads took three times as long as one.
    torch.set_num_threads(max(1, threads // 2))
    try:
        generated: Any = model.generate(
            input_ids=prompts.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(len(row.answer) for row in rows) + 4,
            do_sample=False,
            eos_token_id=list(end_ids),
            pad_token_id=pad_id,
        )
    finally:
        torch.set_num_threads(threads)
    return [_until(ids, end_ids) for ids in generated[:, width:].tolist()]


def _until(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    return ids[: next((index for index, token in enumerate(ids) if token in end_ids), len(ids))]


def main(request_path: str) -> None:
    """Load base model and adapter as ``request_path`` (JSON) says, score the rows, write the scores beside it.

    The request has ``base`` (folder or Hub id), ``adapter`` (folder), ``device``, ``rows``, ``pad_id``, ``end_ids`` and
    ``result`` (file to write). The result has ``loss``, ``answers`` and ``foreign_modules``: imported modules that
    belong to `hf_memeff`. The first answer tokens' logits go into ``result`` + ".safetensors".
    """
    import transformers
    from peft import PeftModel
    from safetensors.torch import save_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    base = transformers.AutoModelForCausalLM.from_pretrained(request["base"], dtype=torch.float32, use_safetensors=True)
    model = PeftModel.from_pretrained(base.to(request["device"]), request["adapter"]).eval()
    rows = [TokenRow(**row) for row in request["rows"]]
    loss, logits = answer_loss(model, rows, request["pad_id"])
    answers = greedy_answers(model, rows, request["pad_id"], request["end_ids"])
    foreign = sorted(name for name in sys.modules if name.split(".")[0] == "hf_memeff")
    save_file({"first_logits": logits}, request["result"] + ".safetensors")
    with open(request["result"], "w", encoding="utf-8") as file:
        json.dump({"loss": loss, "answers": answers, "foreign_modules": foreign}, file)


if __name__ == "__main__":
    main(sys.argv[1])
