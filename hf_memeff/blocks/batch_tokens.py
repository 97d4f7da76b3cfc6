"""What a step's batch says about its tokens: which predict a label, which are padding, where packed sequences start.

Blocks see hidden states alone. A hook on the model reads this from the arguments of the call and hands it to the blocks
in a context variable, for the duration of the call.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memeff.ops.saliency import query_positions, random_saliency
from hf_memeff.ops.selection import KeptTokens, always_kept, select

IGNORED = -100


@dataclass
class BatchTokens:
    """The tokens of one call of the model.

    Attributes:
        predicted: (B, S) bool, rows that predict a label; ``None`` without labels.
        real: (B, S) bool, tokens that are not padding; ``None`` where nothing is padded.
        segments: (B, S) int64, number of the packed sequence a token belongs to; ``None`` for one sequence per row.
        content: the call's input ids, or one feature of its embeddings.
        state: checksum of the CPU generator's state when the model was called. The random selection is seeded from it
            and from the content: epochs draw anew, while a re-run and every block of a call draw the same tokens, a
            resumed run those of an uninterrupted one, and the generator stays where LoRA would have it.
        compiled: whether the call is part of a compiled model's.
    """

    predicted: Tensor | None = None
    real: Tensor | None = None
    segments: Tensor | None = None
    content: Tensor | None = field(default=None, repr=False)
    state: int = 0
    compiled: bool = False
    _found: dict[Any, Any] = field(default_factory=dict, repr=False)

    def always(self, shape: tuple[int, int], device: torch.device, sink_tokens: int, keep_last: bool) -> Tensor:
        """The tokens that are kept whatever their score, (B, S) bool; found once per call of the model."""
        key = "always", shape, device, sink_tokens, keep_last
        if key not in self._found:
            starts = torch.zeros(shape, dtype=torch.bool, device=device)
            starts[:, 0] = True
            if self.segments is not None:
                segments = self.segments.to(device)
                starts[:, 1:] |= segments[:, 1:] != segments[:, :-1]
            self._found[key] = always_kept(self.real_on(device), starts, sink_tokens, keep_last)
        return self._found[key]

    def real_on(self, device: torch.device) -> Tensor | None:
        """``real`` on a device (the blocks of a model may lie on several)."""
        return None if self.real is None else self.real.to(device)

    def queries(
        self, shape: tuple[int, int], device: torch.device, query_rows: str | int
    ) -> tuple[Tensor, Tensor | None]:
        """Positions of the rows whose attention is scored, and which slots hold one; found once per call."""
        key = "queries", shape, device, query_rows
        if key not in self._found:
            last = self.always(shape, device, 0, True)
            if self.predicted is None or query_rows == "last":
                candidates = last
            else:  # a sequence without labels asks its last token
                predicted = self.predicted.to(device)
                candidates = torch.where(predicted.any(1, keepdim=True), predicted, last)
            limit = query_rows if isinstance(query_rows, int) else None
            self._found[key] = query_positions(candidates, limit)
        return self._found[key]

    def random(self, shape: tuple[int, int], device: torch.device, always: Tensor, count: int) -> KeptTokens:
        """Random tokens, the same for every block of the call."""
        key = "random", shape, device, count
        if key not in self._found:
            scores = random_saliency(shape, _seed(self.content, self.state), device)
            self._found[key] = select(scores, self.real_on(device), always, count)
        return self._found[key]


@dataclass(frozen=True)
class _Entry:
    """One hooked call on the way: the module, its tokens, and the call around it."""

    module: nn.Module
    tokens: BatchTokens
    outer: _Entry | None


_current: ContextVar[_Entry | None] = ContextVar("hf_memeff_batch_tokens", default=None)


def current_tokens() -> BatchTokens | None:
    """The tokens of the call that is running, or ``None`` outside of one."""
    found = _current.get()
    return found.tokens if found is not None else None


# not a context variable: on an accelerator a checkpoint runs its block again in a thread of the autograd engine
_calls: dict[tuple[int, torch.Size], tuple[StorageWeakRef, BatchTokens]] = {}
_lock = threading.Lock()


def remember(hidden: Tensor, tokens: BatchTokens) -> None:
    """Note that a block was called with these hidden states, so that a checkpoint's re-run, which happens outside of
    the model's call but with the same hidden states, finds the tokens again. Noted as long as the hidden states live.
    """
    with _lock:
        for key in [key for key, (storage, _) in _calls.items() if storage.expired()]:
            del _calls[key]
        _calls[_key(hidden)] = StorageWeakRef(hidden.untyped_storage()), tokens


def recall(hidden: Tensor) -> BatchTokens | None:
    """The tokens noted for these hidden states, or ``None``."""
    with _lock:
        storage, tokens = _calls.get(_key(hidden), (None, None))
    return tokens if storage is not None and not storage.expired() else None


def _key(hidden: Tensor) -> tuple[int, torch.Size]:
    return hidden.data_ptr(), hidden.shape


def enter_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the attached model: read the call's tokens, whatever an interrupted call has left behind."""
    _enter(module, args, kwargs, None, torch.compiler.is_compiling())


def enter_decoder(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the modules that run the blocks: their arguments say more about the rows than the model's,
    which may have put rows in front of them (images, soft prompts).
    """
    _enter(module, args, kwargs, _current.get(), torch.compiler.is_compiling())


@torch.compiler.disable
def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outer: _Entry | None, compiled: bool
) -> None:
    if module.training and (outer is None or outer.module is not module):
        tokens = read_tokens(module, args, kwargs, outer.tokens if outer is not None else None)
        tokens.compiled = compiled or tokens.compiled
        _current.set(_Entry(module, tokens, outer))


@torch.compiler.disable
def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of both, run even when the forward raised."""
    found = _current.get()
    if found is not None and found.module is module:
        _current.set(found.outer)


def read_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outer: BatchTokens | None = None
) -> BatchTokens:
    """Read labels, padding and packing from the arguments of a module's call.

    Args:
        module: the model or its decoder.
        args: positional arguments.
        kwargs: keyword arguments.
        outer: what the call around it said; it stands where this one says nothing and the rows are the same.
    """
    named = dict(kwargs)
    if args:
        named |= inspect.signature(module.forward).bind_partial(*args).arguments
    ids, embeddings = named.get("input_ids"), named.get("inputs_embeds")
    source = ids if isinstance(ids, Tensor) else embeddings
    shape = source.shape[:2] if isinstance(source, Tensor) and source.dim() >= 2 else None
    labelled_rows = type(module).__name__.endswith("ForTokenClassification")
    tokens = BatchTokens(
        _predicted(named.get("labels"), named.get("shift_labels"), shape, shifted=not labelled_rows),
        _real(named.get("attention_mask"), shape),
        _segments(named.get("position_ids"), named.get("cu_seq_lens_q"), shape),
        _content(ids, embeddings),
        zlib.crc32(torch.get_rng_state().numpy().tobytes()),
    )
    if outer is None:
        return tokens
    for name in ("predicted", "real", "segments"):
        theirs = getattr(outer, name)
        if getattr(tokens, name) is None and theirs is not None and (shape is None or theirs.shape == shape):
            setattr(tokens, name, theirs)
    tokens.content = outer.content if outer.content is not None else tokens.content
    tokens.state, tokens.compiled = outer.state, outer.compiled
    return tokens


def _predicted(labels: Any, shift_labels: Any, shape: torch.Size | None, *, shifted: bool) -> Tensor | None:
    def for_rows(value: Any) -> bool:  # labels of a sequence classifier are no rows
        return isinstance(value, Tensor) and value.dim() == 2 and (shape is None or value.shape == shape)

    if for_rows(shift_labels):
        return shift_labels != IGNORED
    if not for_rows(labels):
        return None
    if not shifted:
        return labels != IGNORED
    return nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1), value=False)


def _real(mask: Any, shape: torch.Size | None) -> Tensor | None:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or (shape is not None and mask.shape != shape):
        return None
    return mask.bool()


def _segments(positions: Any, cumulative: Any, shape: torch.Size | None) -> Tensor | None:
    """Packed sequences: a position that does not follow the one before it starts a new one; without positions, by the
    cumulative lengths that flash kernels take.
    """
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] >= 2:
        restarts = positions[:, 1:] != positions[:, :-1] + 1
        return nn.functional.pad(restarts.long().cumsum(1), (1, 0))
    if positions is None and isinstance(cumulative, Tensor) and shape is not None and shape[0] == 1:
        return packed_segments(cumulative, shape[1])
    return None


def packed_segments(cumulative: Tensor, length: int) -> Tensor:
    """(1, S) numbers of packed sequences from their cumulative lengths, as flash kernels take them."""
    starts = torch.zeros(1, length, dtype=torch.int64, device=cumulative.device)
    inner = cumulative[1:-1].long()
    return starts.index_fill_(1, inner[inner < length], 1).cumsum(1)


def _content(input_ids: Any, embeddings: Any) -> Tensor | None:
    if isinstance(input_ids, Tensor):
        return input_ids
    # one feature tells batches apart; all of them would stay in memory for it
    return embeddings.detach()[..., 0].clone() if isinstance(embeddings, Tensor) and embeddings.dim() == 3 else None


def _seed(content: Tensor | None, state: int) -> int:
    seed = torch.initial_seed() + state
    if content is not None:
        data = content.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        seed += zlib.crc32(data) << 31
    return seed % 2**63
