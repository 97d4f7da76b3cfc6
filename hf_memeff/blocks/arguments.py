"""A decoder layer's arguments: bound to names, and split into tensors (for ``save_for_backward``) and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# The names transformers has used for the key-value cache of a layer, newest first.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the n-th tensor among flattened arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class PackedArguments:
    """Keyword arguments without their tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    def unpack(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments with ``tensors`` back in their places."""
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


def pack(kwargs: dict[str, Any]) -> tuple[PackedArguments, list[Tensor]]:
    """Take the tensors out of keyword arguments (nested in tuples, lists, dicts too)."""
    leaves, spec = tree_flatten(kwargs)
    tensors: list[Tensor] = []
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kept.append(_Slot(len(tensors)))
            tensors.append(leaf)
        else:
            kept.append(leaf)
    return PackedArguments(tuple(kept), spec), tensors


def bind(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]] | None:
    """The hidden states and everything else by name, or ``None`` for a call whose positional arguments have no names.

    Args:
        names: positional parameters of the layer's forward, without ``self``; the first is the hidden states.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if not names or len(args) > len(names):
        return None
    bound = dict(zip(names, args, strict=False)) | kwargs
    return bound.pop(names[0]), bound


def filled_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a key-value cache with entries is passed: a prefix that a re-run must not change or lose."""
    for name in CACHE_NAMES:
        cache = kwargs.get(name)
        if cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0):
            return True
    return False


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the (empty) key-value cache taken out."""
    dropped: dict[str, Any] = {name: None for name in CACHE_NAMES if name in kwargs}
    if "use_cache" in kwargs:
        dropped["use_cache"] = False
    return kwargs | dropped
