"""Long text for the AnchorAttention benchmark, one part to measure on and another to calibrate on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_memeff.benchmarks.sage_text import DataError


@dataclass(frozen=True)
class LongText:
    """Tokens of one long text: measured from its start, calibrated on its end, never both on the same ones.

    Attributes:
        ids: (tokens,) int64.
        calibration_tokens: how many of the last ones are for calibration.
    """

    ids: Tensor
    calibration_tokens: int

    def measured(self, tokens: int, number: int = 0) -> Tensor:
        """(1, tokens): one of the consecutive passages of a length, from the start of the text.

        Raises:
            DataError: it would reach into the calibration's part.
        """
        stop = (number + 1) * tokens
        if stop > len(self.ids) - self.calibration_tokens:
            raise DataError(
                f"Got a text of {len(self.ids)} tokens, expected {stop} to measure on and {self.calibration_tokens} "
                "others to calibrate on. Fix: --data FOLDER with more text, or shorter --lengths."
            )
        return self.ids[stop - tokens : stop][None]

    def calibration(self) -> Tensor:
        """(1, calibration_tokens): the end of the text."""
        return self.ids[len(self.ids) - self.calibration_tokens :][None]


def read_long_text(folder: Path | None, tokenizer: Any, calibration_tokens: int) -> LongText:
    """Tokenise a long text.

    Args:
        folder: its ``*.txt`` files, UTF-8, are joined in the order of their names; ``None`` takes the language
            reference that Python itself carries, about 113,000 tokens of English with SmolLM2's tokenizer.
        tokenizer: a `PreTrainedTokenizerBase`.
        calibration_tokens: see `LongText`.

    Raises:
        DataError: no such files, or one that is not UTF-8.
    """
    text = _python_topics() if folder is None else _folder_text(folder)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return LongText(torch.tensor(ids, dtype=torch.long), calibration_tokens)


def _folder_text(folder: Path) -> str:
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise DataError(
            f"Got no *.txt file in {folder}, expected long text to measure on. Fix: put some there, or leave --data "
            "out for the language reference that Python carries."
        )
    try:
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"Got a text in {folder} that cannot be read ({error}), expected UTF-8. Fix: see it."
        ) from error


def _python_topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "Got a Python without pydoc_data.topics, expected its language reference as text. "
            "Fix: --data FOLDER with *.txt files."
        ) from error
    return "\n".join(topics.values())
