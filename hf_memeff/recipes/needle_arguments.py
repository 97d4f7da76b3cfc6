"""The keys of a needle grid's config: model, texts, lengths and depths, and AnchorAttention's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from hf_memeff.integrations.attention import AnchorAttentionConfig
from hf_memeff.recipes.config_keys import config_arguments, explained, given_values, parse_keys
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.needle_facts import FACTS

_ANCHOR_KEYS = ("block_size", "step", "init_blocks", "dense_tail", "max_keep", "dense_above", "backend")
"""Fields of `AnchorAttentionConfig` that are the user's: thresholds are calibrated, and no prompt is too short."""


@dataclass
class NeedleArguments:
    """What is asked, of which model; see each field's help. Names are those of `RunArguments` where it has the same.

    Raises:
        RecipeError: a value is outside its range.
    """

    output_dir: str = field(default="anchor_needle", metadata={"help": "Folder for results and thresholds."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "A folder, a .gguf file, or a Hub id. None: SmolLM2-135M-Instruct, found here or downloaded.",
            "aliases": ["--model"],
        },
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a model on the Hub."})
    dtype: str = field(
        default="float32",
        metadata={"help": "Dtype of the model's weights.", "choices": ("bfloat16", "float16", "float32")},
    )
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU where there is an accelerator."})
    lengths: list[int] = field(
        default_factory=lambda: [8192], metadata={"help": "Tokens of the prompts that needles are hidden in."}
    )
    depths: list[float] = field(
        default_factory=lambda: [0.1, 0.3, 0.5, 0.7, 0.9],
        metadata={"help": f"Where needles are, 0 is the start of the text; at most {len(FACTS)}, a fact for each."},
    )
    text: str | None = field(
        default=None,
        metadata={"help": "Folder whose *.txt files are the text. None: the language reference that Python carries."},
    )
    calibration_tokens: int = field(
        default=8192, metadata={"help": "Tokens of that text, from its end, that thresholds are calibrated on."}
    )
    question_lengths: list[int] = field(
        default_factory=lambda: [8192], metadata={"help": "Tokens of the documents that questions are about."}
    )
    questions: int = field(default=10, metadata={"help": "Questions about each document."})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": (
                "File, folder or Hub id with passages (context), question, and answers or answer, as SQuAD has them: "
                "a document is many passages. None: the order notes that the package carries."
            )
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_test_split: str = field(default="validation", metadata={"help": "Split of the data set."})
    answer_tokens: int = field(default=8, metadata={"help": "Most tokens of an answer."})

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise RecipeError(
                f"Got dtype: {self.dtype}, expected bfloat16, float16 or float32. Fix: pass one of these."
            )
        for name in ("lengths", "question_lengths", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise RecipeError(f"Got {name}: {values}, expected at least one, and none twice. Fix: name each once.")
        if not all(0 <= depth <= 1 for depth in self.depths) or len(self.depths) > len(FACTS):
            raise RecipeError(
                f"Got depths: {self.depths}, expected up to {len(FACTS)} numbers from 0 to 1. Fix: pass 0.1 0.5 0.9."
            )
        for name in ("questions", "answer_tokens"):
            if getattr(self, name) < 1:
                raise RecipeError(f"Got {name}: {getattr(self, name)}, expected at least 1. Fix: leave it out.")


def parse_needles(config: Path, words: Sequence[str] = ()) -> tuple[NeedleArguments, AnchorAttentionConfig]:
    """Read a config file, with some of its fields replaced.

    Args:
        config: YAML file; its keys are the fields of `NeedleArguments` and the settings of `AnchorAttentionConfig`
            that say how a calibrated model chooses: block_size, step, init_blocks, dense_tail, max_keep, dense_above
            and backend.
        words: command-line words that replace fields of it.

    Raises:
        RecipeError: the file is missing or no mapping, a key is unknown, a value is of the wrong type or range, or a
            text has no keys to choose from at these settings.
    """
    wanted = [item for item in fields(AnchorAttentionConfig) if item.name in _ANCHOR_KEYS]
    arguments, given = parse_keys(config, words, NeedleArguments, config_arguments(AnchorAttentionConfig, wanted))
    with explained(config, AnchorAttentionConfig.__name__):
        anchor = AnchorAttentionConfig(**given_values(given))
    superblock = anchor.block_size * anchor.step
    least = min(*arguments.lengths, *arguments.question_lengths, arguments.calibration_tokens)
    if least < superblock + anchor.block_size:
        raise RecipeError(
            f"Got {least} as the least of lengths, question_lengths and calibration_tokens, expected at least "
            f"{superblock + anchor.block_size}: keys are chosen beyond the first superblock of block_size x step = "
            f"{superblock} tokens. Fix: longer texts, or a smaller step."
        )
    return arguments, anchor
