"""The end of a causal LM (final norm and output layer), for an early look at what a block's rows predict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_memeff.blocks.layouts import part
from hf_memeff.ops.precision import accumulation_dtype
from hf_memeff.ops.saliency import loss_saliency

FINAL_NORM = "_hf_memeff_final_norm"
"""Name, on an attached model, of its final norm's dotted name."""


@dataclass
class Readout:
    """Final norm and output layer of the model whose call is running.

    Attributes:
        norm: the final norm.
        head: the output layer.
    """

    norm: nn.Module
    head: nn.Module
    _mean: Tensor | None = field(default=None, repr=False)

    def scores(self, hidden: Tensor, targets: Tensor, labelled: Tensor) -> Tensor | None:
        """``loss_saliency`` of a block's input (B, S, D), or ``None`` where the weights are not here as a whole (a
        sharded model between its gathers).
        """
        weight = _weight(self.head)
        if weight is None or weight.is_meta or weight.shape[-1] != hidden.shape[-1]:
            return None
        with torch.no_grad():
            if self._mean is None:
                self._mean = weight.mean(0, dtype=accumulation_dtype(weight.dtype))
            return loss_saliency(hidden, targets, labelled, self.norm, weight, self._mean.to(hidden.device))


def attach_readout(model: nn.Module, decoders: Iterable[nn.Module], saliency: str) -> None:
    """Find the final norm of a model and note it on the model.

    Args:
        model: with attached blocks.
        decoders: its modules that run the blocks.
        saliency: the setting that needs it, for the error.

    Raises:
        ValueError: the model has no output layer over a vocabulary, or its final norm is not found.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    weight = _weight(head) if head is not None else None
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
    return None if name is None else Readout(part(model, name), model.get_output_embeddings())


def _weight(head: nn.Module) -> Tensor | None:
    weight = getattr(head, "weight", None)
    plain = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    return weight if plain and not hasattr(weight, "full_tensor") else None


def _final_norm(model: nn.Module, decoders: Iterable[nn.Module], width: int) -> str | None:
    """The last child of a decoder that is called a norm and has a vector of that width as its weight."""
    names = {id(module): name for name, module in model.named_modules()}
    for decoder in decoders:
        for child, found in reversed(list(decoder.named_children())):
            weight = getattr(found, "weight", None)
            if "norm" in type(found).__name__.lower() and isinstance(weight, Tensor) and weight.shape == (width,):
                return f"{names[id(decoder)]}.{child}".lstrip(".")
    return None
