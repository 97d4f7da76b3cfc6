"""The mask function of "anchor": transformers asks once per forward pass, and gets no larger a mask than is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedModel

logger = logging.getLogger("hf_memeff")

_MADE_HERE = "_hf_memeff_anchor"
_CHECKED_ELEMENTS = 2**22  # of a mask that is compared with a guess, at a time


def made_here(mask: Tensor) -> bool:
    """Whether a whole mask is what transformers makes, not a user's own, so that it knows nothing of position ids."""
    return hasattr(mask, _MADE_HERE)


def is_traced(device: torch.device | str = "cpu") -> bool:
    """Whether a program is being recorded, in which a choice made now would be frozen, or tensors have no values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.device(device).type == "meta"


def _has_config(kind: type[Any], config_class: Hashable) -> bool:
    return getattr(kind, "config_class", None) is config_class


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


@cache
def _calls_functions(config_class: Hashable) -> bool:
    """Whether models of a config call transformers' attention functions, which alone know what `anchor_mask` means.

    ``set_attn_implementation`` asks the same of a model and refuses; ``from_pretrained`` does not ask.
    """
    models = [kind for kind in _subclasses(PreTrainedModel) if _has_config(kind, config_class)]
    # a user's subclass, which may have no source to look at, says nothing about attention: its family's base class does
    models = [kind for kind in models if not any(_has_config(base, config_class) for base in kind.__mro__[1:])]
    found = all(getattr(kind, "_can_set_attn_implementation", lambda: True)() for kind in models)
    if not found:
        logger.warning(
            '%s has attention of its own, which attn_implementation="anchor" cannot replace: it stays dense.',
            models[0].__name__,
        )
    return found


def _causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return key <= row


def anchor_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = _causal,
    attention_mask: Tensor | None = None,
    *,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass.

    Causal rows are recognised from what the mask function says, not from its name: it must show every row its first
    real key and its own, and not the key after it; so a window, or a chunk, is not taken for plain causal.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask: as transformers'
            ``sdpa_mask``; ``q_offset`` is a tensor under a static cache.
        allow_is_causal_skip: transformers' word that nothing but padding was added to a causal, sliding or chunked
            mask.
        use_vmap: a user's function is part of the mask.
        config: the model's.
        cache_position: positions of the queries, which transformers 5.0 passes in place of ``q_length`` and
            ``q_offset``.
        kwargs: passed on to ``sdpa_mask``; ``device`` among them.

    Returns:
        ``None`` for plain causal rows that have no keys but their own; (B, K) for causal rows with padding, with
        earlier keys or of packed sequences, in which 0 is padding, other numbers are sequences, and K ends with the
        last query (a static cache is longer); else transformers' own (B, 1, Nq, Nk), bool. A model with attention of
        its own gets eager's, which is added to the scores.
    """
    whole = {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": allow_is_causal_skip,
        "use_vmap": use_vmap,
        "config": config,
        **kwargs,
    }
    if cache_position is None:
        rows = 0 if q_length is None else q_length  # symbolic while a program is exported
        whole |= {"q_length": q_length, "q_offset": q_offset}
    else:
        rows, q_offset = cache_position.shape[0], cache_position[0]
        whole["cache_position"] = cache_position
    if config is not None and not _calls_functions(config.__class__):
        return AttentionMaskInterface()["eager"](**whole)
    device = kwargs.get("device") or (cache_position.device if cache_position is not None else "cpu")
    if is_traced(device) or rows == 1:
        return _whole_mask(whole)
    # a decoder that was told to be bidirectional still calls its layers causal: the mask has to say otherwise
    if not getattr(config, "is_causal", True):
        whole["allow_is_bidirectional_skip"] = False
    # without a mask the attention function takes rows for the last ones, transformers' for the first
    whole["allow_is_causal_skip"] = False
    offset, filled = int(q_offset), int(q_offset) + rows
    if use_vmap or kv_offset != 0 or filled > kv_length:
        return _whole_mask(whole)
    real = _real_keys(attention_mask, batch_size, filled)
    ask = _Question(mask_function, batch_size, offset, rows, torch.device(device))
    if not ask.is_causal():
        return _whole_mask(whole)
    if not allow_is_causal_skip:
        packed = ask.packed() if attention_mask is None and offset == 0 and filled == kv_length else None
        return _whole_mask(whole) if packed is None else packed
    if not ask.sees_first(real):
        return _whole_mask(whole)
    if real is not None and not bool(real.all()):
        return real
    if offset == 0 and filled == kv_length:
        return None
    return torch.ones(batch_size, filled, dtype=torch.bool, device=device)


def _whole_mask(arguments: dict[str, Any]) -> Tensor | None:
    mask = AttentionMaskInterface()["sdpa"](**arguments)
    if mask is not None and not is_traced():
        setattr(mask, _MADE_HERE, True)
    return mask


def _real_keys(attention_mask: Tensor | None, batch: int, filled: int) -> Tensor | None:
    """(B, filled) bool, or ``None`` where nothing is padding; a mask that ends early has padding behind it."""
    if attention_mask is None:
        return None
    real = attention_mask[:, :filled].bool()
    return torch.nn.functional.pad(real, (0, filled - real.shape[1])).expand(batch, -1)


class _Question:
    """What a mask function says about the rows of one forward pass, asked one key per row at a time."""

    def __init__(
        self, function: Callable[..., Tensor], batch: int, offset: int, queries: int, device: torch.device
    ) -> None:
        self.function, self.filled, self.device = function, offset + queries, device
        self.batch = torch.arange(batch, device=device)[:, None, None, None]
        self.head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        self.rows = torch.arange(offset, self.filled, device=device)[None, None, :, None]

    def seen(self, keys: Tensor, rows: Tensor | None = None) -> Tensor:
        """Whether each row sees a key; ``keys`` broadcasts with (B, 1, Nq, 1)."""
        rows = self.rows if rows is None else rows
        shape = torch.broadcast_shapes(self.batch.shape, rows.shape, keys.shape)
        return self.function(self.batch, self.head, rows, keys).expand(shape)

    def is_causal(self) -> bool:
        """Every row sees its own key, and none the key after it."""
        after = (self.rows + 1).clamp(max=self.filled - 1)
        return bool(self.seen(self.rows).all()) and not bool((self.seen(after) & (after > self.rows)).any())

    def sees_first(self, real: Tensor | None) -> bool:
        """Every row from a sequence's first real key on sees that key."""
        if real is None:
            first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        else:
            first = real.int().argmax(1)[:, None, None, None]
        return bool((self.seen(first) | (self.rows < first)).all())

    def packed(self) -> Tensor | None:
        """Layout (B, N) of packed sequences, 1 and up, if the whole mask is that and no more; ``None`` if it is not,
        or if there is one sequence only.
        """
        before = (self.rows - 1).clamp(min=0)
        starts = ~self.seen(before)[:, 0, :, 0]
        starts[:, 0] = False
        if not bool(starts.any()):
            return None
        layout = starts.cumsum(1).int() + 1
        keys = torch.arange(self.filled, device=self.device)[None, None, None, :]
        for rows in self.rows.split(max(1, _CHECKED_ELEMENTS // (self.filled * len(layout))), 2):
            place = rows.flatten()
            same = layout[:, None, place, None] == layout[:, None, None, :]
            if not torch.equal(self.seen(keys, rows), same & (keys <= rows)):
                return None
        return layout
