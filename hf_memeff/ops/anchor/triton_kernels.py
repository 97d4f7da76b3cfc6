"""The three kernels of the Triton backend: anchors, stripes, attention. This is the only file that imports triton.

A tile's rows see their keys in an order that puts the init keys first, then the kept ones, then the local ones, which
end with the rows' own. So one loop reads all three, contiguous or gathered, and only its last steps need the causal
mask. Scores are in base 2, s = (q . k) scale log2(e), as exp2 is what the hardware has. Sums are float32; products of
float32 inputs take three TF32 products each, which is as precise as float32. Offsets into q, k, v and out are 64-bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(7)
"""Columns of the table of tiles, int64: row of the batch, row of q of the first position, first and last position + 1,
first key of the sequence in k, first and last candidate + 1 (0 and 0 where every key is seen)."""

COUNT, FILL, RANK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What `stripe_kernel` does with the keys that are kept: count them, list them, count them by eight bits of margin."""

LN_2 = tl.constexpr(0.6931471805599453)


def padded(size: int, least: int = 16) -> int:
    """The next power of 2, which the sides of a kernel's tiles have to be."""
    return max(least, 1 << (size - 1).bit_length())


def parts(dtype: torch.dtype) -> int:
    """How many numbers of a dtype add up to a float32 without rounding."""
    return 1 if dtype == torch.float32 else 3


def stripe_shape(size: int, group: int, dtype: torch.dtype) -> dict[str, int]:
    """How `stripe_kernel` is launched: heads of a group that share what is read, averaged rows of each (those of a
    superblock of the paper), keys, and what the compiler is told.

    It is not tuned, as all its passes have to be the same; the averaged rows of four heads are what registers hold.
    """
    half = dtype != torch.float32
    heads = min(4, padded(group, 1)) if half and size <= 128 else 1
    shape = {"HEADS": heads, "POOLED": 16, "KEYS": 32, "num_warps": 2 if heads == 1 else 4, "num_stages": 2}
    if half and heads < 4 and size <= 128:
        # without a limit of its own ptxas spills some bytes to fit one more block on a multiprocessor
        shape["maxnreg"] = 168
    return shape


def _configs(*choices: tuple[int, int, int, int]) -> list[triton.Config]:
    return [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in choices
    ]


HALF_CONFIGS = _configs((128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 4, 2))
"""Rows, keys, warps and stages to choose from for half precision. Larger tiles spill registers at D = 128."""

FULL_CONFIGS = _configs((16, 32, 4, 2), (32, 32, 8, 2))
"""The same for float32, of which each number takes two registers when it is split into TF32 parts; `anchor_kernel`
has the first alone."""


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **meta: Any) -> list[triton.Config]:
    """Those for a call's dtype that fit the shared memory of every GPU from sm_80 on, or else the smallest."""
    item_bytes = arguments["q"].element_size()
    configs = [c for c in configs if (c in FULL_CONFIGS) == (item_bytes == 4)]

    def tile_bytes(config: triton.Config) -> int:
        # one stage's tiles are in use, or on their way to registers, while the others' are read
        keys = config.kwargs["KEYS"] * (config.num_stages - 1) * (meta["BLOCK_D"] + meta.get("BLOCK_DV", 0))
        return (config.kwargs["ROWS"] * meta["BLOCK_D"] + keys) * item_bytes

    return [c for c in configs if tile_bytes(c) <= _SHARED_BYTES] or [min(configs, key=tile_bytes)]


_SHARED_BYTES = 96 * 1024


@triton.jit
def _read_tile(tiles, tile):
    """A row of the table of tiles; positions as int32, what offsets are made from as int64."""
    at = tiles + tile * TILE_FIELDS
    batch = tl.load(at)
    query_row = tl.load(at + 1)
    start = tl.load(at + 2).to(tl.int32)
    stop = tl.load(at + 3).to(tl.int32)
    key_row = tl.load(at + 4)
    first = tl.load(at + 5).to(tl.int32)
    last = tl.load(at + 6).to(tl.int32)
    return batch, query_row, start, stop, key_row, first, last


@triton.jit
def _load_rows(base, index, stride, there, SIZE: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr = False):
    """Rows of a matrix with SIZE columns, as (rows, BLOCK) with zeros behind the last column.

    ``there`` says which rows there are, the others are 0; with ALL it is not looked at.
    """
    column = tl.arange(0, BLOCK)
    at = base + index.to(tl.int64)[:, None] * stride + column[None, :]
    if not ALL:
        rows = tl.load(at, mask=there[:, None] & (column < SIZE)[None, :], other=0.0)
    elif SIZE != BLOCK:
        rows = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(at)
    return rows


@triton.autotune(
    configs=[*HALF_CONFIGS, FULL_CONFIGS[0]],
    key=["D"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["blocks"])
def anchor_kernel(
    q,
    k,
    tiles,
    means,
    anchors,
    stride_q_batch,
    stride_q_head,
    stride_q_row,
    stride_k_batch,
    stride_k_head,
    stride_k_row,
    log2_scale,
    heads,
    group,
    blocks,
    block_size,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Mean of q and of the largest logit over init and local keys, for each block of rows of the tiles with candidates.

    Grid (tiles * blocks, H). q (B, H, Nq, D) and k (B, Hkv, Nk, D) by their strides; means (tiles, blocks, H, PARTS, D)
    in their dtype, parts that add up to the float32 mean; anchors (tiles, blocks, H), float32. Blocks behind a tile's
    last are left as they are.
    """
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1).to(tl.int64)
    batch, query_row, start, stop, key_row, first, last = _read_tile(tiles, tile)
    low = tl.maximum(start, (start // block_size + block) * block_size)
    high = tl.minimum(stop, (start // block_size + block + 1) * block_size)
    if low >= high:
        return
    q_base = q + batch * stride_q_batch + head * stride_q_head + (query_row - start) * stride_q_row
    k_base = k + batch * stride_k_batch + (head // group) * stride_k_head + key_row * stride_k_row
    q_sum = tl.zeros([BLOCK_D], tl.float32)
    top_sum = 0.0
    for row in range(low, high, ROWS):
        position = row + tl.arange(0, ROWS)
        queries = _load_rows(q_base, position, stride_q_row, position < high, D, BLOCK_D)
        q_sum += tl.sum(queries.to(tl.float32), 0)
        seen = first + tl.minimum(row + ROWS, high) - last
        top = tl.full([ROWS], float("-inf"), tl.float32)
        for step in range(0, seen, KEYS):
            place = step + tl.arange(0, KEYS)
            key = tl.where(place < first, place, place - first + last)
            keys = _load_rows(k_base, key, stride_k_row, place < seen, D, BLOCK_D)
            scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * log2_scale
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            top = tl.maximum(top, tl.max(scores, 1))
        top_sum += tl.sum(tl.where(position < high, top, 0.0), 0)
    column = tl.arange(0, BLOCK_D)
    rows = (high - low).to(tl.float32)
    at = (tile * blocks + block).to(tl.int64) * heads + head
    mean = q_sum / rows
    for part in tl.static_range(PARTS):
        rounded = mean.to(means.dtype.element_ty)
        tl.store(means + (at * PARTS + part) * D + column, rounded, mask=column < D)
        mean -= rounded.to(tl.float32)
    tl.store(anchors + at, top_sum / rows)


@triton.jit(do_not_specialize=["mode", "shift", "blocks", "chunks"])
def stripe_kernel(
    k,
    tiles,
    means,
    anchors,
    cuts,
    quotas,
    starts,
    counts,
    positions,
    ranks,
    digits,
    stride_k_batch,
    stride_k_head,
    stride_k_row,
    log2_scale,
    heads,
    group,
    blocks,
    block_size,
    chunks,
    mode,
    shift,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    POOLED: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Which candidates are kept: pooled scores, the comparison and the list of stripes in one operator.

    A key's margin is the largest of mean(q) . k scale - mean(x_a) over the blocks of a tile. It is kept if it is above
    the head's cut, and if it is equal to it as long as the chunk's quota of such keys lasts. Every pass is the same
    machine code, so that what is counted is what is listed.

    Grid (tiles * chunks, Hkv * ceil(G / HEADS)). Tensors, with a row for each tile and query head:
        k (B, Hkv, Nk, D) by its strides; means and anchors as `anchor_kernel` wrote them.
        cuts (rows), float32.
        quotas (rows, chunks), int32: how many keys at the cut a chunk keeps. Read to fill.
        starts (rows, chunks), int64: where a chunk's list begins, -1 for one that nobody needs. Read to fill.
        counts (rows, chunks, 2), int32: keys above the cut and at it. Written to count.
        positions (listed), int32: kept positions in the sequence, ascending for each row. Written to fill.
        ranks (rows, 256), int32: keys from the cut on by the bits of their margin from ``shift`` on, added to rank.
        digits (rows), int32: what is subtracted from these bits; keys outside of 0 to 255 are left out.
    """
    tile = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    parts = tl.cdiv(group, HEADS)
    key_head = tl.program_id(1) // parts
    batch, _, start, stop, key_row, first, last = _read_tile(tiles, tile)
    begin = first + chunk * CHUNK
    if begin >= last:
        return
    end = tl.minimum(begin + CHUNK, last)
    k_base = k + batch * stride_k_batch + key_head.to(tl.int64) * stride_k_head + key_row * stride_k_row
    pools = (stop - 1) // block_size - start // block_size + 1

    member = (tl.program_id(1) % parts) * HEADS + tl.arange(0, HEADS)
    here = member < group
    row = tile.to(tl.int64) * heads + key_head * group + member
    cut = tl.load(cuts + row, mask=here, other=float("inf"))
    slot = row * chunks + chunk
    quota = tl.zeros([HEADS], tl.int32)
    list_start = tl.full([HEADS], -1, tl.int64)
    if mode == FILL:
        quota = tl.load(quotas + slot, mask=here, other=0)
        list_start = tl.load(starts + slot, mask=here, other=-1)
    digit = tl.zeros([HEADS], tl.int32)
    if mode == RANK:
        digit = tl.load(digits + row, mask=here, other=0)

    index = tl.arange(0, HEADS * POOLED)
    pooled_member = (tl.program_id(1) % parts) * HEADS + index // POOLED
    above = tl.zeros([HEADS], tl.int32)
    equal = tl.zeros([HEADS], tl.int32)
    listed = tl.zeros([HEADS], tl.int32)
    ranked = tl.zeros([HEADS * 256], tl.int32)
    for low in range(begin, end, KEYS):
        key = low + tl.arange(0, KEYS)
        keys = tl.trans(_load_rows(k_base, key, stride_k_row, key < end, D, BLOCK_D))
        margin = tl.full([HEADS, KEYS], float("-inf"), tl.float32)
        for pool in tl.range(0, pools, POOLED, num_stages=1):
            pooled = pool + index % POOLED
            valid = (pooled < pools) & (pooled_member < group)
            at = (tile * blocks + pooled).to(tl.int64) * heads + key_head * group + pooled_member
            scores = tl.zeros([HEADS * POOLED, KEYS], tl.float32)
            for part in tl.range(0, PARTS, num_stages=1):  # a loop: three parts at once are more than registers hold
                queries = _load_rows(means, at * PARTS + part, D, valid, D, BLOCK_D)
                scores = tl.dot(queries, keys, scores, input_precision="tf32x3")
            anchor = tl.load(anchors + at, mask=valid, other=float("inf"))
            scores = scores * log2_scale - anchor[:, None]
            margin = tl.maximum(margin, tl.max(tl.reshape(scores, [HEADS, POOLED, KEYS]), 1))
        there = (key < end)[None, :] & here[:, None]
        is_above = ((margin > cut[:, None]) & there).to(tl.int32)
        is_equal = ((margin == cut[:, None]) & there).to(tl.int32)
        if mode == FILL:
            nth_equal = equal[:, None] + tl.cumsum(is_equal, 1)
            taken = is_above | (is_equal & (nth_equal <= quota[:, None]).to(tl.int32))
            nth = listed[:, None] + tl.cumsum(taken, 1) - 1
            at = list_start[:, None] + nth
            tl.store(positions + at, key[None, :] + nth * 0, mask=(taken != 0) & (list_start >= 0)[:, None])
            listed += tl.sum(taken, 1)
        if mode == RANK:
            # floats in the order of integers: the bits below the sign are turned over where it is negative
            bits = margin.to(tl.int32, bitcast=True)
            bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            place = (bits >> shift) - digit[:, None]
            counted = ((is_above | is_equal) != 0) & (place >= 0) & (place < 256)
            place = place + tl.arange(0, HEADS)[:, None] * 256
            flat = tl.reshape(counted, [HEADS * KEYS])
            ranked += tl.histogram(tl.reshape(tl.where(counted, place, 0), [HEADS * KEYS]), HEADS * 256, mask=flat)
        above += tl.sum(is_above, 1)
        equal += tl.sum(is_equal, 1)
    if mode == COUNT:
        tl.store(counts + slot * 2, above, mask=here)
        tl.store(counts + slot * 2 + 1, equal, mask=here)
    if mode == RANK:
        place = tl.arange(0, HEADS * 256)
        first_row = tile.to(tl.int64) * heads + key_head * group + (tl.program_id(1) % parts) * HEADS
        tl.atomic_add(ranks + first_row * 256 + place, ranked, mask=ranked != 0, sem="relaxed")


@triton.jit
def _fold(
    queries,
    k_base,
    v_base,
    stride_k_row,
    stride_v_row,
    positions,
    position,
    step,
    first,
    kept,
    last,
    seen,
    log2_scale,
    top,
    total,
    mixed,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax over KEYS keys from place ``step`` of the rows' order of keys."""
    place = step + tl.arange(0, KEYS)
    gathered = tl.load(positions + place - first, mask=(place >= first) & (place < first + kept), other=0)
    key = tl.where(place < first, place, tl.where(place < first + kept, gathered, place - first - kept + last))
    there = place < seen
    keys = _load_rows(k_base, key, stride_k_row, there, D, BLOCK_D, not MASKED)
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * log2_scale
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    values = _load_rows(v_base, key, stride_v_row, there, DV, BLOCK_DV, not MASKED)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="tf32x3")
    return new_top, total, mixed


@triton.autotune(
    configs=[*HALF_CONFIGS, *FULL_CONFIGS],
    key=["D", "DV"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["rows"])
def attend_kernel(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    tiles,
    stripes,
    positions,
    stride_q_batch,
    stride_q_head,
    stride_q_row,
    stride_k_batch,
    stride_k_head,
    stride_k_row,
    stride_v_batch,
    stride_v_head,
    stride_v_row,
    stride_o_batch,
    stride_o_head,
    stride_o_row,
    stride_l_batch,
    stride_l_head,
    log2_scale,
    heads,
    group,
    rows,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Softmax over init, kept and local keys of each row, or over all of them where a tile of a head is dense.

    Grid (tiles * ceil(rows / ROWS), H), ``rows`` being those of the longest tile; late tiles, which see most keys, come
    first. q, k, v and out by their strides, lse (B, H, Nq) with rows next to each other, sinks (H,) float32.
    stripes (tiles, H, 2), int64: where a head's list begins in ``positions`` and how long it is, -1 for all keys.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program // row_blocks
    head = tl.program_id(1).to(tl.int64)
    batch, query_row, start, stop, key_row, first, last = _read_tile(tiles, tile)
    low = start + program % row_blocks * ROWS
    if low >= stop:
        return
    high = tl.minimum(low + ROWS, stop)
    stripe = stripes + (tile.to(tl.int64) * heads + head) * 2
    listed = positions + tl.load(stripe)
    kept = tl.load(stripe + 1).to(tl.int32)
    if kept < 0:
        first, kept, last = first * 0, kept * 0, last * 0

    position = low + tl.arange(0, ROWS)
    q_base = q + batch * stride_q_batch + head * stride_q_head + (query_row - start) * stride_q_row
    k_base = k + batch * stride_k_batch + (head // group) * stride_k_head + key_row * stride_k_row
    v_base = v + batch * stride_v_batch + (head // group) * stride_v_head + key_row * stride_v_row
    queries = _load_rows(q_base, position, stride_q_row, position < stop, D, BLOCK_D)
    if HAS_SINKS:  # a key of its own that comes before the others and has no value
        top = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head) / LN_2
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    # in the order of keys the first row sees as many as there are before its own and it; all rows see these
    plain = (first + kept + low + 1 - last) // KEYS * KEYS
    seen = first + kept + high - last
    for step in range(0, plain, KEYS):
        top, total, mixed = _fold(
            queries, k_base, v_base, stride_k_row, stride_v_row, listed, position, step, first, kept, last, seen,
            log2_scale, top, total, mixed, D, DV, BLOCK_D, BLOCK_DV, KEYS, False,
        )  # fmt: skip
    for step in range(plain, seen, KEYS):
        top, total, mixed = _fold(
            queries, k_base, v_base, stride_k_row, stride_v_row, listed, position, step, first, kept, last, seen,
            log2_scale, top, total, mixed, D, DV, BLOCK_D, BLOCK_DV, KEYS, True,
        )  # fmt: skip
    there = position < stop
    column = tl.arange(0, BLOCK_DV)
    o_base = out + batch * stride_o_batch + head * stride_o_head + (query_row - start) * stride_o_row
    at = o_base + position.to(tl.int64)[:, None] * stride_o_row + column[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=there[:, None] & (column < DV)[None, :])
    l_base = lse + batch * stride_l_batch + head * stride_l_head + query_row - start
    tl.store(l_base + position, (top + tl.log2(total)) * LN_2, mask=there)


COMPILED = isinstance(stripe_kernel, triton.runtime.JITFunction)
"""Whether the kernels run on a GPU; false in Triton's interpreter, which runs them on the CPU (TRITON_INTERPRET=1)."""
