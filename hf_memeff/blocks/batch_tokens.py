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

from hf_memeff.ops.saliency import query_positions, random_saliency
from hf_memeff.ops.selection import KeptTokens, always_kept, select

IGNORED = -100


@dataclass
class BatchTokens:
    """The tokens of one call of the model.

    Attributes:
        predicted: (B, S) bool, rows whose next token is a label; ``None`` without labels.
        real: (B, S) bool, tokens that are not padding; ``None`` where nothing is padded.
        segments: (B, S) int64, number of the packed sequence a token belongs to; ``None`` for one sequence per row.
        content: the call's input ids, or one feature of its embeddings. The random selection is seeded from it and from
            the run's seed, so that it needs no state: a re-run, a resumed run and every block draw the same tokens.
        compiled: whether the call is part of a compiled model's.
    """

    predicted: Tensor | None = None
    real: Tensor | None = None
    segments: Tensor | None = None
    content: Tensor | None = field(default=None, repr=False)
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
            candidates = self.predicted
            if candidates is None or query_rows == "last":
                candidates = self.always(shape, device, 0, True)
            limit = query_rows if isinstance(query_rows, int) else None
            self._found[key] = query_positions(candidates.to(device), limit)
        return self._found[key]

    def random(self, shape: tuple[int, int], device: torch.device, always: Tensor, count: int) -> KeptTokens:
        """Random tokens, the same for every block of the call."""
        key = "random", shape, device, count
        if key not in self._found:
            scores = random_saliency(shape, _seed(self.content), device)
            self._found[key] = select(scores, self.real_on(device), always, count)
        return self._found[key]


_current: ContextVar[tuple[nn.Module, BatchTokens] | None] = ContextVar("hf_memeff_batch_tokens", default=None)


def current_tokens() -> BatchTokens | None:
    """The tokens of the call that is running, or ``None`` outside of one."""
    found = _current.get()
    return found[1] if found is not None else None


_REMEMBERED = 64
# not a context variable: on an accelerator a checkpoint runs its block again in a thread of the autograd engine
_calls: dict[tuple[int, torch.Size], BatchTokens] = {}
_lock = threading.Lock()


def remember(hidden: Tensor, tokens: BatchTokens) -> None:
    """Note that a block was called with these hidden states, so that a checkpoint's re-run, which happens outside of
    the model's call but with the same hidden states, finds the tokens again. The last 64 calls are known.
    """
    with _lock:
        _calls.pop(_key(hidden), None)
        _calls[_key(hidden)] = tokens
        while len(_calls) > _REMEMBERED:
            del _calls[next(iter(_calls))]


def recall(hidden: Tensor) -> BatchTokens | None:
    """The tokens noted for these hidden states, or ``None``."""
    with _lock:
        return _calls.get(_key(hidden))


def _key(hidden: Tensor) -> tuple[int, torch.Size]:
    return hidden.data_ptr(), hidden.shape


def enter_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model: read the call's tokens. Inside another hooked model nothing changes."""
    _enter(module, args, kwargs, torch.compiler.is_compiling())


@torch.compiler.disable
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
    if _current.get() is None and module.training:
        tokens = read_tokens(module, args, kwargs)
        tokens.compiled = compiled
        _current.set((module, tokens))


@torch.compiler.disable
def leave_batch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a model, run even when its forward raised."""
    found = _current.get()
    if found is not None and found[0] is module:
        _current.set(None)


def read_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchTokens:
    """Read labels, padding and packing from the arguments of a model's call."""
    named = dict(kwargs)
    if args:
        named |= inspect.signature(module.forward).bind_partial(*args).arguments
    return BatchTokens(
        _predicted(named.get("labels"), named.get("shift_labels")),
        _real(named.get("attention_mask")),
        _segments(named.get("position_ids")),
        _content(named.get("input_ids"), named.get("inputs_embeds")),
    )


def _predicted(labels: Any, shift_labels: Any) -> Tensor | None:
    if isinstance(shift_labels, Tensor) and shift_labels.dim() == 2:
        return shift_labels != IGNORED
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return None  # labels of a sequence classifier are no rows
    return nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1), value=False)


def _real(mask: Any) -> Tensor | None:
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _segments(positions: Any) -> Tensor | None:
    """Packed sequences: a position that does not follow the one before it starts a new one."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    restarts = positions[:, 1:] != positions[:, :-1] + 1
    return nn.functional.pad(restarts.long().cumsum(1), (1, 0))


def _content(input_ids: Any, embeddings: Any) -> Tensor | None:
    if isinstance(input_ids, Tensor):
        return input_ids
    # one feature tells batches apart; all of them would stay in memory for it
    return embeddings.detach()[..., 0].clone() if isinstance(embeddings, Tensor) and embeddings.dim() == 3 else None


def _seed(content: Tensor | None) -> int:
    if content is None:
        return torch.initial_seed() % 2**63
    data = content.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return (torch.initial_seed() + zlib.crc32(data)) % 2**63
