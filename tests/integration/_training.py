"""A tokenizer of 120 words, small data sets, and trainers around the tiny models; nothing is downloaded."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from helpers import VOCAB, fill_adapters, tiny_model, token_batch

datasets.disable_progress_bars()

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
WORDS = [f"w{index}" for index in range(VOCAB - 4)]

# What every run here shares: no reports, no progress bars, no files but those a test asks for, the CPU.
_QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}

_OF_THE_TRAINER = {"compute_loss_func", "compute_metrics", "eval_dataset"}


def tokenizer() -> PreTrainedTokenizerFast:
    """Splits at blanks; ids 0 to 3 are padding, start, end and unknown, as in the tiny models' configs."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def texts(rows: int, shortest: int = 5, longest: int = 40, seed: int = 0) -> list[str]:
    """Sentences of uneven length whose next word depends on the last one, so that there is something to learn."""
    draw = random.Random(seed)
    found = []
    for _ in range(rows):
        word, length = draw.randrange(len(WORDS)), draw.randint(shortest, longest)
        words = [(word + 7 * step) % len(WORDS) for step in range(length)]
        found.append(" ".join(WORDS[index] for index in words))
    return found


def completions(rows: int, seed: int = 0) -> Dataset:
    """Prompt and completion of uneven lengths; TRL labels the prompts -100."""
    prompts, answers = texts(rows, 2, 20, seed), texts(rows, 3, 20, seed + 1)
    return Dataset.from_list([{"prompt": p, "completion": " " + a} for p, a in zip(prompts, answers, strict=True)])


def rows_with_uneven_labels(rows: int = 8) -> list[dict[str, Any]]:
    """Rows of one length, of which 2, 4, 6, ... tokens are labelled and the others are -100."""
    batch = token_batch(rows=rows, length=2 * rows + 3)
    for row in range(rows):
        batch["labels"][row, : -2 * (row + 1)] = -100
    return [{name: values[row] for name, values in batch.items()} for row in range(rows)]


def adapted(
    config_cls: type[LoraConfig] = LoraConfig, base: PreTrainedModel | None = None, **settings: Any
) -> nn.Module:
    """A tiny model with a filled adapter, the same one for each config class."""
    model = get_peft_model(tiny_model() if base is None else base, config_cls(**{**LORA, **settings}))
    fill_adapters(model)
    return model


def sft(
    folder: Any,
    model: Any,
    peft_config: Any = None,
    data: Dataset | None = None,
    callbacks: Any = None,
    **settings: Any,
) -> SFTTrainer:
    """TRL's trainer with its own defaults (bf16, gradient checkpointing), 10 steps of 4 rows."""
    arguments = {"max_steps": 10, "per_device_train_batch_size": 4, "learning_rate": 5e-3, **_QUIET, **settings}
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(folder), **arguments),
        train_dataset=completions(48) if data is None else data,
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=callbacks,
    )


def trainer(folder: Any, model: nn.Module, data: Any = None, callbacks: Any = None, **settings: Any) -> Trainer:
    """transformers' trainer, 4 steps of 2 rows; its own keywords go to it, all others to its arguments."""
    own = {name: settings.pop(name) for name in _OF_THE_TRAINER & set(settings)}
    arguments = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, **_QUIET, **settings}
    data = rows_with_uneven_labels() if data is None else data
    return Trainer(model, TrainingArguments(str(folder), **arguments), train_dataset=data, callbacks=callbacks, **own)


def losses(trained: Trainer) -> list[float]:
    """Loss of each step, unrounded."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each trained parameter by name, as float64."""
    return {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Messages that reach the named logger meanwhile, at WARNING and above."""
    logger, collect = logging.getLogger(name), _Collect()
    level, verbosity = logger.level, transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    logger.setLevel(logging.WARNING)
    logger.addHandler(collect)
    try:
        yield collect.messages
    finally:
        logger.removeHandler(collect)
        transformers_logging.set_verbosity(verbosity)
        logger.setLevel(level)
