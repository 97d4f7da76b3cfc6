"""From padding and packing to sequences and masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_memeff.ops.anchor.layout import boundaries, layout_mask, layout_segments, plain_segments, restarts
from hf_memeff.ops.anchor.tiling import Segment


def by_definition(layout: Tensor, queries: int, window: int | None) -> Tensor:
    """`layout_mask` element by element."""
    batch, keys = layout.shape
    seen = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for row in range(batch):
        for query in range(queries):
            t = keys - queries + query
            for key in range(t + 1):
                near = window is None or key > t - window
                same = layout[row, t] == 0 or layout[row, t] == layout[row, key]
                seen[row, 0, query, key] = near and same and layout[row, key] != 0
    return seen


LAYOUTS = [
    torch.tensor([[1, 1, 1, 1, 1]]),
    torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]),
    torch.tensor([[1, 2, 2, 3, 3]]),
]


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["plain", "padded", "packed"])
def test_mask_is_what_the_layout_says(layout: Tensor, queries: int, window: int | None) -> None:
    assert torch.equal(layout_mask(layout, queries, window), by_definition(layout, queries, window))


def test_segments_of_padded_rows_end_with_their_queries() -> None:
    assert layout_segments(LAYOUTS[1], 5) == [Segment(0, 2, 3, 2, 3), Segment(1, 0, 3, 0, 3)]
    # two rows of queries: row 1 has none that is real
    assert layout_segments(LAYOUTS[1], 2) == [Segment(0, 0, 2, 2, 3)]


def test_segments_of_packed_rows() -> None:
    assert layout_segments(LAYOUTS[2], 5) == [Segment(0, 0, 1, 0, 1), Segment(0, 1, 2, 1, 2), Segment(0, 3, 2, 3, 2)]
    assert layout_segments(LAYOUTS[2], 3) == [Segment(0, 0, 1, 1, 2), Segment(0, 1, 2, 3, 2)]


def test_a_gap_has_no_segments() -> None:
    assert layout_segments(torch.tensor([[1, 1, 0, 1, 1]]), 5) is None
    assert layout_segments(torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 1]]), 1) is None


def test_plain_segments_put_the_last_query_at_the_last_key() -> None:
    assert plain_segments(2, 3, 10) == [Segment(0, 0, 3, 0, 10), Segment(1, 0, 3, 0, 10)]


def test_positions_that_start_again_are_packed_sequences() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert restarts(positions).tolist() == [[1, 1, 1, 2, 2, 3]]
    assert restarts(torch.arange(6)[None]) is None
    # positions that repeat or jump are no new sequence: images share positions in some models
    assert restarts(torch.tensor([[0, 1, 1, 1, 5, 6]])) is None
    assert restarts(torch.tensor([[3, 4, 5]])) is None


def test_boundaries_are_packed_sequences() -> None:
    assert boundaries(torch.tensor([0, 3, 5, 6])).tolist() == [[1, 1, 1, 2, 2, 3]]
    assert boundaries(torch.tensor([0, 6])) is None
