"""Which keys a query row sees first, may see, and sees last: the tiling that every backend shares.

A position t counts from the first real token of a sequence. With a = init_blocks * block_size, S = step * block_size,
b = floor(t / S) and l = max(a, b S - block_size), a row's keys are init = [0, min(a, t + 1)), candidates = [a, l) and
local = [l, t]; together they are [0, t], each key once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_memeff.ops.anchor.config import AnchorAttentionConfig


@dataclass(frozen=True)
class Segment:
    """One sequence of one row of the batch; its queries are its last tokens, its keys all of them (causal).

    Attributes:
        batch: row of the batch.
        query_start: index of its first query row in q.
        queries: number of its query rows, >= 1.
        key_start: index of its first key in k: position 0.
        keys: number of its keys, >= queries.
    """

    batch: int
    query_start: int
    queries: int
    key_start: int
    keys: int

    @property
    def offset(self) -> int:
        """Position of the first query row: how many keys were there before."""
        return self.keys - self.queries

    @property
    def query_rows(self) -> slice:
        """Its rows in q."""
        return slice(self.query_start, self.query_start + self.queries)

    @property
    def key_rows(self) -> slice:
        """Its rows in k and v."""
        return slice(self.key_start, self.key_start + self.keys)


@dataclass(frozen=True)
class Tile:
    """Consecutive query positions [start, stop) of one superblock that share their candidates.

    Attributes:
        start: first position.
        stop: one past the last.
        first_candidate: a; keys before it are always kept.
        last_candidate: l, one past the last candidate; keys from it on are local.
    """

    start: int
    stop: int
    first_candidate: int
    last_candidate: int

    @property
    def candidates(self) -> int:
        """Number of candidate keys; 0 where every key is init or local."""
        return max(0, self.last_candidate - self.first_candidate)

    def blocks(self, block_size: int) -> Iterator[slice]:
        """Rows of the tile, counted from its start, that are averaged together: those of one block of positions."""
        start = self.start
        while start < self.stop:
            stop = min(self.stop, (start // block_size + 1) * block_size)
            yield slice(start - self.start, stop - self.start)
            start = stop


def segment_tiles(segment: Segment, config: AnchorAttentionConfig) -> Iterator[Tile]:
    """Tiles of a segment's query rows, in order.

    Rows that see every key come as tiles without candidates. These are a segment shorter than ``min_length`` or with
    fewer queries than a block, the first superblocks, and the dense tail.
    """
    init = config.init_blocks * config.block_size
    superblock = config.step * config.block_size
    short = segment.keys < config.min_length or segment.queries < config.block_size
    tail = segment.offset if short else max(segment.offset, segment.keys - config.dense_tail)
    start = segment.offset
    while start < tail:
        base = start // superblock * superblock
        stop = min(tail, base + superblock)
        yield Tile(start, stop, init, max(init, base - config.block_size))
        start = stop
    if tail < segment.keys:
        yield Tile(tail, segment.keys, init, init)


def has_candidates(segments: Sequence[Segment], config: AnchorAttentionConfig) -> bool:
    """Whether any row of a call has candidate keys, so that the call is not dense anyway."""
    return any(tile.candidates for segment in segments for tile in segment_tiles(segment, config))
