"""Figures of "Memory-Efficient Structured Backpropagation for On-Device LLM Fine-Tuning", arXiv 2602.13069."""

from __future__ import annotations

from typing import NamedTuple


class PaperCase(NamedTuple):
    """What a figure of the paper is for: its setting is 4-bit base weights, LoRA in bfloat16, batch 1, SGD 1e-4."""

    model: str
    tokens: int
    rank: int


class PaperFigure(NamedTuple):
    """Peak memory in the paper's megabytes, by its own meter on its own devices, and seconds of a step."""

    megabytes: float
    seconds: float | None = None


_HALF, _ONE_AND_A_HALF, _THREE = "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"

PAPER: dict[tuple[str, PaperCase], PaperFigure] = {
    ("mebp", PaperCase(_HALF, 256, 8)): PaperFigure(360.8, 0.68),
    ("mebp", PaperCase(_ONE_AND_A_HALF, 256, 8)): PaperFigure(516.2, 1.66),
    ("mebp", PaperCase(_THREE, 256, 8)): PaperFigure(637.6, 3.21),
    ("mesp", PaperCase(_HALF, 256, 8)): PaperFigure(136.2, 0.86),
    ("mesp", PaperCase(_ONE_AND_A_HALF, 256, 8)): PaperFigure(262.6, 2.17),
    ("mesp", PaperCase(_THREE, 256, 8)): PaperFigure(368.4, 4.09),
    ("mebp", PaperCase(_HALF, 128, 8)): PaperFigure(252.7),
    ("mebp", PaperCase(_HALF, 512, 8)): PaperFigure(582.4),
    ("mebp", PaperCase(_HALF, 1024, 8)): PaperFigure(1050.3),
    ("mesp", PaperCase(_HALF, 128, 8)): PaperFigure(110.7),
    ("mesp", PaperCase(_HALF, 512, 8)): PaperFigure(245.8),
    ("mesp", PaperCase(_HALF, 1024, 8)): PaperFigure(513.6),
    ("mebp", PaperCase(_HALF, 256, 4)): PaperFigure(355.2),
    ("mebp", PaperCase(_HALF, 256, 16)): PaperFigure(372.4),
    ("mebp", PaperCase(_HALF, 256, 32)): PaperFigure(395.8),
    ("mesp", PaperCase(_HALF, 256, 4)): PaperFigure(132.8),
    ("mesp", PaperCase(_HALF, 256, 16)): PaperFigure(143.5),
    ("mesp", PaperCase(_HALF, 256, 32)): PaperFigure(158.2),
    ("mesp-h", PaperCase(_THREE, 256, 8)): PaperFigure(398.5, 3.85),
}
"""By key of our method and case."""
