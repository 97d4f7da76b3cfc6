"""The end of a causal LM (final norm and output layer), for an early look at what a block's rows predict."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_memeff.blocks.layouts import part
from hf_memeff.ops.precision import accumulation_dtype
from hf_memeff.ops.saliency import loss_saliency

_MEAN_ROWS = 1024  # rows of a tile of the mean: a few MB

FINAL_NORM = "_hf_memeff_final_norm"
"""Name, on an attached model, of its final norm's dotted name."""


class Readout:
    """Final norm and output layer of the model whose call is running.

    Both are held weakly: what a call says about its tokens is remembered past it, and must not keep an output layer of
    a model that is gone.

    Args:
        norm: the final norm.
        head: the output layer; an adapter on it does not enter.
    """

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        self._norm, self._head = weakref.ref(norm), weakref.ref(head)
        self._mean: Tensor | None = None

    def unreadable(self, width: int) -> str:
        """Why hidden states of that width cannot be read at this moment, or an empty string: weights come and go where
        they are sharded or offloaded.
        """
        norm, head = self._norm(), self._head()
        if norm is None or head is None:
            return "the model is gone"
        weight = _matrix(head)
        if weight is None or not all(map(_is_whole, (weight, *norm.parameters()))):
            return "the weights of its final norm and output layer are not here as a whole (sharded or offloaded)"
        return "" if weight.shape[1] == width else f"its output layer takes {weight.shape[1]} features, not {width}"

    @torch.no_grad()
    def scores(self, hidden: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        """``loss_saliency`` of a readable block's input (B, S, D) for the rows at ``places`` (n, 2)."""
        norm, head = self._norm(), self._head()
        weight = None if head is None else _matrix(head)
        assert norm is not None and weight is not None
        if self._mean is None:
            self._mean = _mean_row(weight)
        # not a call of the norm: hooks on it are told of the model's own use of it alone
        bias = getattr(head, "bias", None)
        return loss_saliency(hidden, targets, places, norm.forward, weight, self._mean.to(hidden.device), bias)


def attach_readout(model: nn.Module, decoders: Iterable[nn.Module], saliency: str) -> None:
    """Find the final norm of a model and note it on the model.

    Args:
        model: with attached blocks.
        decoders: its modules that run the blocks, the language model's last.
        saliency: the setting that needs it, for the error.

    Raises:
        ValueError: the model has no output layer over a vocabulary, or its final norm is not found.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    weight = _matrix(head) if head is not None else None
    reason = "it has no output layer whose weight is a plain matrix"
    if weight is not None:
        name = _final_norm(model, decoders, weight.shape[1])
        if name is not None:
            model.__dict__[FINAL_NORM] = name
            return
        reason = "its final norm was not found"
    raise ValueError(
        f"got saliency={saliency!r} on a {type(model).__name__} that cannot be read early ({reason}), expected a "
        'causal LM with a norm between its blocks and its output layer. Fix: pass saliency="attention".'
    )


def detach_readout(model: nn.Module) -> None:
    """Forget what ``attach_readout`` noted."""
    model.__dict__.pop(FINAL_NORM, None)


def readout_of(model: nn.Module) -> Readout | None:
    """The end of a model on which ``attach_readout`` noted it."""
    name = model.__dict__.get(FINAL_NORM)
    head = None if name is None else model.get_output_embeddings()
    return None if name is None or head is None else Readout(part(model, name), head)


def _matrix(head: nn.Module) -> Tensor | None:
    """The output layer's weight (V, D), sharded (a DTensor) or on the meta device too; ``None`` if it is quantised."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    known = type(weight.data) is Tensor or hasattr(weight, "full_tensor")
    return weight if known and weight.is_floating_point() and weight.itemsize > 1 else None


def _is_whole(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and not weight.is_meta and weight.numel() > 0


def _mean_row(weight: Tensor) -> Tensor:
    """Mean of the rows of (V, D), in tiles: a reduction that widens its input would copy the whole of it on a CPU."""
    dtype = accumulation_dtype(weight.dtype)
    total = torch.zeros(weight.shape[1], dtype=dtype, device=weight.device)
    for tile in weight.split(_MEAN_ROWS):
        total += tile.sum(0, dtype=dtype)
    return total / len(weight)


def _final_norm(model: nn.Module, decoders: Iterable[nn.Module], width: int) -> str | None:
    """The last child of a decoder that is called a norm and has a vector of that width as its weight."""
    names = {id(module): name for name, module in model.named_modules()}
    for decoder in reversed(list(decoders)):
        for child, found in reversed(list(decoder.named_children())):
            found = getattr(found, "original_module", found)  # PEFT's wrapper of a module that is trained and saved
            weight = getattr(found, "weight", None)
            if "norm" in type(found).__name__.lower() and isinstance(weight, Tensor) and weight.shape == (width,):
                return f"{names[id(decoder)]}.{child}".lstrip(".")
    return None
