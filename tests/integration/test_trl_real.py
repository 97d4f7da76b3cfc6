"""Twenty steps of TRL's SFT and DPO on SmolLM2-135M, grade-school problems: MeSP's and exact SAGE's losses are LoRA's.

Skipped without the model on this machine, or without the data: gsm8k_train.jsonl and gsm8k_model_solutions.jsonl in the
folder that HF_MEMEFF_DATA names, or in shared/data beside the checkout.
"""

import copy
import json
import math
import os
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_memeff import MespConfig, SageConfig
from hf_memeff.recipes.model_source import ModelUnavailableError, find_smollm2, load_model, load_tokenizer
from integration._training import losses

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

DATA = Path(os.environ.get("HF_MEMEFF_DATA") or Path(__file__).parents[3] / "shared" / "data")
STEPS = 20
OURS = {"mesp": MespConfig, "sage": partial(SageConfig, token_budget=1.0)}
SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 1,
    "learning_rate": 2e-4,
    "logging_steps": 1,
    "bf16": False,
    "max_length": 160,  # longer than the rows
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
}


def rows_of(name):
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"needs {name} in {DATA}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shortest(rows):
    """As many rows as there are steps, those of the least text, so that a step takes seconds."""
    return Dataset.from_list(sorted(rows, key=lambda row: sum(map(len, row.values())))[:STEPS])


def problems():
    return shortest(
        {"prompt": row["question"], "completion": "\n" + row["answer"]} for row in rows_of("gsm8k_train.jsonl")
    )


def preferences():
    """The right solution against a wrong one of the smallest model that got it wrong."""
    found = []
    for row in rows_of("gsm8k_model_solutions.jsonl"):
        wrong = [v["solution"] for v in row.values() if isinstance(v, dict) and not v["is_correct"]]
        if wrong:
            found.append({"prompt": row["question"], "chosen": "\n" + row["ground_truth"], "rejected": "\n" + wrong[0]})
    return shortest(found)


@cache
def base():
    """The model and its tokenizer; unpacking the weights takes longer than the steps."""
    try:
        source = find_smollm2(allow_download=False)
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    return load_model(source, torch.float32), load_tokenizer(source)


@cache
def run(trainer, method):
    """Losses of the steps, unrounded."""
    config_cls = {"lora": LoraConfig, **OURS}[method]
    trainer_cls, args_cls, data = {
        "sft": (SFTTrainer, SFTConfig, problems),
        "dpo": (DPOTrainer, DPOConfig, preferences),
    }[trainer]
    rows, (model, tokenizer) = data(), base()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        built = trainer_cls(
            model=copy.deepcopy(model),
            args=args_cls(output_dir=folder, **SETTINGS),
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=config_cls(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        built.train()
    found = losses(built)
    print(trainer, method, " ".join(f"{loss:.6f}" for loss in found))
    return found


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_twenty_losses_are_lora_s(trainer, method):
    expected, found = run(trainer, "lora"), run(trainer, method)
    assert len(found) == STEPS and max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-4
    assert min(expected[-5:]) < expected[0] - 0.01  # it learns
    if trainer == "dpo":
        assert found[0] == pytest.approx(math.log(2), abs=1e-6)
