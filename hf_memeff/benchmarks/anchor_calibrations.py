"""Calibrated thresholds of the benchmark's model, kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_memeff.benchmarks.anchor_qkv import for_length
from hf_memeff.benchmarks.results import ResultsError
from hf_memeff.integrations.attention import AnchorAttentionConfig, calibrate_anchor

TARGET_RECALL = 0.95


@dataclass(frozen=True)
class Calibrations:
    """A folder with one JSON file per calibration.

    Attributes:
        folder: where the files are.
        base: the `PreTrainedModel`.
        ids: (1, tokens) to calibrate on.
    """

    folder: Path
    base: Any
    ids: Tensor

    @property
    def tokens(self) -> int:
        """How many tokens thresholds are from."""
        return self.ids.shape[1]

    def missing(self, length: int, target: float = TARGET_RECALL) -> bool:
        """Whether `get` would have to calibrate."""
        return not self._path(length, target).exists()

    def get(self, length: int, target: float = TARGET_RECALL) -> AnchorAttentionConfig:
        """The settings of `calibrate_anchor` for a model that takes so many tokens, from the file if there is one.

        Raises:
            ResultsError: the file holds something else.
        """
        path = self._path(length, target)
        if path.exists():
            try:
                return AnchorAttentionConfig.load(path)
            except ValueError as error:
                raise ResultsError(
                    f"Got {path} with no settings of AnchorAttention ({error}), expected those of an earlier run. "
                    "Fix: move it away, or --output DIR."
                ) from error
        config = calibrate_anchor(for_length(self.base, length), self.ids, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        config.save(path)
        return config

    def _path(self, length: int, target: float) -> Path:
        # up to the positions it was trained on, the model is the same whatever the length
        length = max(length, self.base.config.max_position_embeddings)
        return self.folder / f"positions{length}-text{self.tokens}-recall{target:g}.json"
