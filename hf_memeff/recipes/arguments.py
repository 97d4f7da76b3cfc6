"""The keys of a fine-tuning config that are neither the trainer's nor the adapter's: model, data, judging.

Where TRL's own scripts have a key for something (`ScriptArguments`, `ModelConfig`), it has the same name here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hf_memeff.recipes.errors import RecipeError

TRAINERS = ("sft", "dpo")
METHODS = ("mesp", "sage", "lora")
LONG_ROWS = ("error", "drop", "truncate")
METRICS = ("exact_match", "final_number", "choice_accuracy")


def _key(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class RunArguments:
    """What to train, on what, and how to judge it; see each field's help.

    Raises:
        RecipeError: a value is outside its range.
    """

    trainer: str = _key("sft", "Which trainer of TRL: supervised fine-tuning or DPO.", choices=TRAINERS)
    method: str = _key(
        "mesp",
        "How the adapter is trained: 'mesp' (LoRA's gradients, least memory), 'sage' (approximate, faster) or 'lora'.",
        choices=METHODS,
    )
    model_name_or_path: str | None = _key(
        None,
        "A folder, a .gguf file, or a Hub id. None: SmolLM2-135M-Instruct, found on this machine or downloaded.",
        aliases=["--model"],
    )
    model_revision: str | None = _key(None, "Branch, tag or commit of a model on the Hub. None: its main branch.")
    dtype: str = _key("float32", "Dtype of the base model's weights.", choices=("bfloat16", "float16", "float32"))
    attn_implementation: str | None = _key(None, "Attention implementation, as transformers names it.")
    dataset_name: str | None = _key(
        None, "A .jsonl, .json, .csv or .parquet file, a folder of them, or a Hub id. None: the demo's order tickets."
    )
    dataset_config: str | None = _key(None, "Configuration of a Hub data set, such as 'main'.")
    dataset_train_split: str = _key("train", "Split to train on.")
    dataset_test_split: str = _key("test", "Split to judge by.")
    dataset_test_name: str | None = _key(None, "File, folder or Hub id to judge by. None: the test split of the other.")
    dataset_columns: dict[str, str] | str | None = _key(  # noqa: RUF009, a dataclass field that the rule overlooks
        None,
        "Which of the data's columns are TRL's, such as {prompt: question, completion: answer}. None: they have TRL's "
        "names: prompt and completion, messages, or text for SFT; chosen and rejected, with prompt or not, for DPO.",
    )
    dataset_train_rows: int | None = _key(None, "First so many rows to train on. None: all.")
    dataset_test_rows: int | None = _key(None, "First so many rows to judge by. None: all.")
    chat_format: bool = _key(True, "Put plain prompts and answers into the model's chat form, if it has one.")
    long_rows: str = _key(
        "error",
        "What to do with rows longer than max_length: refuse them, leave them out, or let the trainer cut them.",
        choices=LONG_ROWS,
    )
    metrics: list[str] | None = _key(  # noqa: RUF009
        None, f"What to judge the model's own answers by, before and after training; of {', '.join(METRICS)}."
    )
    max_new_tokens: int | None = _key(
        None, "Longest answer to generate for the metrics, in tokens. None: the longest expected one and 8 more."
    )

    license: str | None = _key(None, "Licence of the adapter for its model card, as the Hub names it.")
    language: str | None = _key(None, "Language of the data for the model card, such as 'en'.")

    def __post_init__(self) -> None:
        for name, allowed in (
            ("trainer", TRAINERS),
            ("method", METHODS),
            ("long_rows", LONG_ROWS),
            ("dtype", ("bfloat16", "float16", "float32")),
        ):
            _one_of(name, getattr(self, name), allowed)
        if isinstance(self.metrics, str):
            self.metrics = [self.metrics]
        for metric in self.metrics or ():
            _one_of("metrics", metric, METRICS)
        for name in ("dataset_train_rows", "dataset_test_rows", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"Got {name}: {value}, expected at least 1. Fix: leave it out for the default.")
        if isinstance(self.dataset_columns, str):
            self.dataset_columns = _mapping(self.dataset_columns)
        columns = self.dataset_columns
        if columns is not None and not (
            isinstance(columns, dict) and all(isinstance(text, str) for pair in columns.items() for text in pair)
        ):
            raise _no_columns(columns)

    @property
    def columns(self) -> dict[str, str]:
        """TRL's column names that were given, and the data's own for them."""
        return self.dataset_columns if isinstance(self.dataset_columns, dict) else {}


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecipeError(f"Got {name}: {value}, expected one of {', '.join(allowed)}. Fix: pass one of these.")


def _mapping(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _no_columns(text) from error


def _no_columns(found: object) -> RecipeError:
    return RecipeError(
        f"Got dataset_columns: {found}, expected TRL's names and the data's. "
        'Fix: write it like {"prompt": "question", "completion": "answer"}.'
    )
