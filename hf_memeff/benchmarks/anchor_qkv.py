"""Real queries, keys and values: what a model's layers give their attention on a text, kept on disk."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_memeff.benchmarks.comparison import with_shared_weights
from hf_memeff.integrations.anchor.calls import AttentionCall
from hf_memeff.integrations.anchor.running import run_observed
from hf_memeff.integrations.anchor.settings import LayerState


@dataclass(frozen=True)
class Qkv:
    """What one layer attends with.

    Attributes:
        q: (1, H, N, D).
        k: (1, Hkv, N, D).
        v: (1, Hkv, N, Dv).
        scale: factor of the dot products.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def rope_factor(model: Any, tokens: int) -> float:
    """How far a length exceeds the positions that a model was trained on; 1 if it does not."""
    return max(1.0, tokens / model.config.max_position_embeddings)


def for_length(model: Any, tokens: int) -> Any:
    """A model that takes so many tokens: itself, or one with the same weights and YaRN's rotary positions
    (arXiv 2309.00071) stretched by `rope_factor`.

    Args:
        model: a `PreTrainedModel` with rotary positions; it is not changed.
        tokens: N.
    """
    factor = rope_factor(model, tokens)
    if factor == 1:
        return model
    longer = with_shared_weights(model)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    longer.base_model.rotary_emb = type(longer.base_model.rotary_emb)(config)
    return longer


class _EnoughError(Exception):
    """Ends a forward pass behind the last layer that is wanted."""


@dataclass(frozen=True)
class QkvStore:
    """A folder with one file per layer and text.

    Attributes:
        folder: where the files are.
        name: of the text and its length, which the files are named by.
    """

    folder: Path
    name: str

    def missing(self, layers: Sequence[int]) -> list[int]:
        """Layers without a file."""
        return [layer for layer in layers if not self._path(layer).exists()]

    def fill(self, model: Any, ids: Tensor, layers: Sequence[int], advance: Callable[[str, int], object]) -> None:
        """Run a text through a model once, densely, and keep what the missing layers attend with.

        Args:
            model: see `for_length`.
            ids: (1, N); every layer has to be a causal one without a window.
            layers: which of the model's.
            advance: called with the name of a layer that is there, and with 1.
        """
        missing = self.missing(layers)

        def observe(call: AttentionCall, state: LayerState) -> None:
            if state.layer in missing:
                self._save(state.layer, call)
                advance(f"{self.name}, layer {state.layer}: q, k, v", 1)
            if state.layer == max(missing):
                raise _EnoughError

        if missing:
            # a superblock of one block, so that any text of more than two blocks has candidates and is observed
            with contextlib.suppress(_EnoughError):
                run_observed(model, ids, observe, min_length=1, step=1)

    def load(self, layer: int) -> Qkv:
        """What a layer attends with; its file has to be there."""
        tensors = load_file(self._path(layer))
        return Qkv(tensors["q"], tensors["k"], tensors["v"], tensors["scale"].item())

    def _save(self, layer: int, call: AttentionCall) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {"q": call.query, "k": call.key, "v": call.value}
        kept = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
        path = self._path(layer)
        unfinished = path.with_suffix(".part")
        save_file({**kept, "scale": torch.tensor(call.scale, dtype=torch.float64)}, unfinished)
        unfinished.replace(path)

    def _path(self, layer: int) -> Path:
        return self.folder / f"{self.name}-layer{layer:02}.safetensors"
