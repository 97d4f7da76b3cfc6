"""Every key exactly once: the tiling against its definition, position by position."""

from __future__ import annotations

import pytest

from hf_memeff.ops.anchor.tiling import Segment, has_candidates, segment_tiles
from ops.anchor._inputs import settings


def parts_of(t: int, block: int, step: int, init_blocks: int) -> tuple[range, range, range]:
    """Init, candidates and local keys of position t, from the definition."""
    a, s = init_blocks * block, step * block
    last = max(a, t // s * s - block)
    return range(min(a, t + 1)), range(a, last), range(last, t + 1)


@pytest.mark.parametrize("init_blocks", [0, 1, 3, 9])
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("block", [1, 4])
def test_init_candidates_and_local_cover_every_key_once(block: int, step: int, init_blocks: int) -> None:
    for t in range(4 * block * step + 7):
        assert sorted(key for part in parts_of(t, block, step, init_blocks) for key in part) == list(range(t + 1))


@pytest.mark.parametrize("offset", [0, 1, 31, 32, 50])
@pytest.mark.parametrize("tail", [0, 5, 1000])
@pytest.mark.parametrize("init_blocks", [0, 1, 6])
def test_tiles_cover_the_rows_in_order_with_the_candidates_of_the_definition(
    offset: int, tail: int, init_blocks: int
) -> None:
    config = settings(dense_tail=tail, init_blocks=init_blocks)
    segment = Segment(0, 0, 150, 0, 150 + offset)
    rows = []
    for tile in segment_tiles(segment, config):
        for t in range(tile.start, tile.stop):
            expected = parts_of(t, config.block_size, config.step, init_blocks)[1]
            in_tail = t >= segment.keys - tail
            assert tile.candidates == (0 if in_tail else len(expected)), t
            if tile.candidates:
                assert (tile.first_candidate, tile.last_candidate) == (expected.start, expected.stop)
            rows.append(t)
        blocks = [(t.start, t.stop) for t in tile.blocks(config.block_size)]
        assert [b for b, _ in blocks[1:]] == [e for _, e in blocks[:-1]]
        assert blocks[0][0] == 0 and blocks[-1][1] == tile.stop - tile.start
        assert all((tile.start + stop) % config.block_size == 0 for _, stop in blocks[:-1])
    assert rows == list(range(offset, segment.keys))


@pytest.mark.parametrize(
    ("segment", "changes"),
    [
        (Segment(0, 0, 150, 0, 150), {"min_length": 151}),
        (Segment(0, 0, 7, 0, 150), {}),  # fewer queries than a block: the drafts of assisted decoding
        (Segment(0, 0, 32, 0, 32), {}),  # one superblock
        (Segment(0, 0, 150, 0, 150), {"dense_tail": 150}),
    ],
)
def test_short_segments_have_no_candidates(segment: Segment, changes: dict[str, int]) -> None:
    assert not has_candidates([segment], settings(**changes))
    assert has_candidates([segment, Segment(1, 0, 150, 0, 150)], settings())


def test_keys_of_a_segment_are_counted_from_its_first_real_token() -> None:
    segment = Segment(2, 10, 20, 7, 50)
    assert segment.offset == 30
    assert (segment.query_rows, segment.key_rows) == (slice(10, 30), slice(7, 57))
