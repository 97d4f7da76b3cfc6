"""The Triton backend's results in Triton's interpreter, which runs kernels on the CPU, program by program.

It is on only if TRITON_INTERPRET=1 is set before triton is imported. So pytest does not collect this file by itself:
test_triton_backend.py runs it in a process of its own. A program takes some 30 ms here, which is why calls are small
and each of them has several things to show.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from hf_memeff.ops.anchor import triton_backend, triton_kernels
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import Segment
from ops.anchor._inputs import BLOCK, INF, SUPERBLOCK, counts, dense, inputs, kept_sets, run, settings

FP32 = 1e-5

ODD = [1, 9, 32, 33, 65, 97]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that these sizes fill more than once, and one config, as there is no device to choose by."""
    assert not triton_kernels.COMPILED
    torch.manual_seed(0)
    monkeypatch.setattr(triton_backend, "CHUNK", 64)
    monkeypatch.setattr(triton_backend, "_DENSE_ROWS", 48)
    one = [triton.Config({"ROWS": 16, "KEYS": 32})]
    for kernel in (triton_kernels.anchor_kernel, triton_kernels.attend_kernel):
        monkeypatch.setattr(kernel, "configs", one)


_patched: list[object] = []


def _call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """What a function does that a kernel calls, with tl.core made ready for it once and not at each call."""
    if not _patched and tl.core in [x for x in self.fn.__globals__.values() if inspect.ismodule(x)]:
        _patched.append(interpreter._patch_lang(self.fn))
    return self.rewrite()(*args, **kwargs)


@pytest.fixture(autouse=True)
def interpreter_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.7.1's interpreter multiplies the bits of bfloat16 numbers as integers, and spends half of its time on
    making the language ready for each call of a function and on looking for overflows of each sum.
    """
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", _call)
    plain = builder.create_dot

    def widened(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(builder, "create_dot", lambda a, b, *rest: plain(widened(a), widened(b), *rest))


def agree(found: AnchorResult, expected: AnchorResult, atol: float = FP32) -> None:
    """Kept sets, counts, outputs and log-sum-exps of two backends."""
    assert kept_sets(found) == kept_sets(expected)
    assert counts(found) == counts(expected)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=atol)
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=FP32)


def packed(lengths: list[int]) -> list[Segment]:
    """Sequences one behind the other in one row of the batch."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [Segment(0, start, n, start, n) for start, n in zip(starts, lengths, strict=True)]


def check_dense(q: Tensor, k: Tensor, v: Tensor, segments: list[Segment]) -> None:
    """theta = inf keeps every candidate, by the sparse path, and is dense attention."""
    result = run("triton", q, k, v, settings(theta=INF), segments)
    for segment in segments:
        place = (slice(segment.batch, segment.batch + 1), slice(None))
        own = (
            x[place][:, :, rows] for x, rows in ((q, segment.query_rows), (k, segment.key_rows), (v, segment.key_rows))
        )
        torch.testing.assert_close(result.out[place][:, :, segment.query_rows], dense(*own), rtol=0, atol=FP32)
    assert result.kept == result.candidates and result.dense_tiles == 0
    tiles = {key[0] for key in kept_sets(result)}
    assert tiles == {number for number, segment in enumerate(segments) if segment.keys > SUPERBLOCK}


def test_infinite_theta_is_dense_attention_at_odd_lengths() -> None:
    q, k, v = inputs(heads=1, queries=sum(ODD))
    check_dense(q, k, v, packed(ODD))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 4 * SUPERBLOCK + 8, 15))
def test_infinite_theta_is_dense_attention_at_every_length(first: int) -> None:
    lengths = list(range(first, min(first + 15, 4 * SUPERBLOCK + 8)))
    q, k, v = inputs(heads=1, queries=sum(lengths), seed=first)
    check_dense(q, k, v, packed(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("batch,heads,groups", [(1, 1, 1), (2, 3, 1), (3, 8, 1), (1, 8, 8)])
@pytest.mark.parametrize("queries", [33, 97])
def test_infinite_theta_is_dense_attention_for_heads_and_batches(
    batch: int, heads: int, groups: int, queries: int
) -> None:
    q, k, v = inputs(batch, heads, groups, queries)
    check_dense(q, k, v, [Segment(row, 0, queries, 0, queries) for row in range(batch)])


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1, 5, 31, 32, 40, 100])
def test_infinite_theta_is_dense_attention_after_earlier_keys(offset: int) -> None:
    q, k, v = inputs(2, 2, 1, 40, offset)
    check_dense(q, k, v, [Segment(row, 0, 40, 0, offset + 40) for row in range(2)])


def test_padding_earlier_keys_and_a_threshold_for_each_head() -> None:
    q, k, v = inputs(2, 3, 1, 40, 45)
    segments = [Segment(0, 0, 40, 0, 85), Segment(1, 6, 30, 15, 70)]
    q[1, :, :6] = q[1, :, 36:] = torch.nan
    k[1, :, :15] = k[1, :, 85:] = v[1, :, :15] = v[1, :, 85:] = torch.nan
    thetas = [2.0, -1e4, INF]
    found, expected = (run(name, q, k, v, settings(), segments, thetas) for name in ("triton", "reference"))
    agree(found, expected)
    assert not found.out[1, :, :6].any() and found.lse[1, :, 36:].isneginf().all()


# a cut may be the margin of several keys, which are kept in order as long as there is room
@pytest.mark.parametrize("theta,keep", [(1.0, 5), pytest.param(INF, 30, marks=pytest.mark.slow)])
def test_max_keep_takes_the_highest_margins(theta: float, keep: int) -> None:
    q, k, v = inputs(heads=2, queries=96)
    k[:, :, 40:60] = v[:, :, 40:60] = 0.5
    k[:, :, 20:40] = v[:, :, 20:40] = 0.5
    found, expected = (run(name, q, k, v, settings(theta=theta, max_keep=keep)) for name in ("triton", "reference"))
    assert counts(found) == counts(expected)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=FP32)
    for key, kept in kept_sets(found).items():
        # equal up to which of two equal keys is kept
        same = [sorted(i for i in chosen if not 20 <= i < 60) for chosen in (kept, kept_sets(expected)[key])]
        assert same[0] == same[1] and len(kept) <= keep


def test_dense_parts_sinks_and_other_value_sizes() -> None:
    q, k, v = inputs(heads=2, queries=110, size=12, width=20)
    config = settings(dense_tail=20, init_blocks=0, dense_above=0.5)
    arguments = config, None, [1.5, 4.0], torch.tensor([0.5, -1.0])
    found, expected = (run(name, q, k, v, *arguments) for name in ("triton", "reference"))
    agree(found, expected)
    assert found.dense_tiles and found.sparse_tiles and 0 < found.kept < found.candidates


@pytest.mark.slow
@pytest.mark.parametrize("theta", [4.0, 0.5])
@pytest.mark.parametrize("changes", [{}, {"max_keep": 5}, {"dense_tail": 40}, {"init_blocks": 0}, {"step": 1}], ids=str)
def test_keeps_what_the_reference_keeps_at_every_theta(theta: float, changes: dict) -> None:
    q, k, v = inputs(1, 5, 1, 70, 23)
    config = settings(theta=theta, **changes)
    agree(run("triton", q, k, v, config), run("reference", q, k, v, config))


@pytest.mark.slow
@pytest.mark.parametrize("size,width", [(64, 64), (80, 80), (192, 128), (12, 20)])
@pytest.mark.parametrize("theta", [INF, 1.0])
def test_any_head_size_and_values_of_another(size: int, width: int, theta: float) -> None:
    q, k, v = inputs(heads=2, queries=100, size=size, width=width)
    agree(run("triton", q, k, v, settings(theta=theta)), run("reference", q, k, v, settings(theta=theta)))


@pytest.mark.slow
def test_more_averaged_rows_than_fit_one_product() -> None:
    q, k, v = inputs(heads=2, queries=120)
    config = settings(theta=1.0, block_size=2, step=20)
    agree(run("triton", q, k, v, config), run("reference", q, k, v, config))


# half precision rounds q, k and v the same way for both; what differs is the output's own rounding
@pytest.mark.parametrize(
    "dtype,atol", [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=pytest.mark.slow)]
)
def test_half_precision_keeps_what_float32_arithmetic_says(dtype: torch.dtype, atol: float) -> None:
    q, k, v = inputs(heads=2, queries=97, dtype=dtype)
    found, expected = (run(name, q, k, v, settings(theta=1.0)) for name in ("triton", "reference"))
    assert found.out.dtype == dtype and found.lse.dtype == torch.float32
    agree(found, expected, atol)


@pytest.mark.slow
def test_a_kept_key_moves_the_output_and_a_dropped_one_does_not() -> None:
    q, k, v = inputs(heads=1, queries=100)
    config = settings(theta=2.0)
    before = run("triton", q, k, v, config)
    start = 96
    kept = set(kept_sets(before)[0, 0, start])
    candidates = set(range(BLOCK, start - BLOCK))
    assert kept and candidates - kept
    for key, moves in ((min(kept), True), (min(candidates - kept), False)):
        changed = v.clone()
        changed[0, 0, key] += 10
        after = run("triton", q, k, changed, config).out[0, 0, start:]
        assert (not torch.equal(after, before.out[0, 0, start:])) == moves


def test_strides_above_32_bits() -> None:
    queries, size = 40, 8
    stride = 2**31 // 32
    try:
        memory = torch.empty(stride * queries + 64)
    except RuntimeError:
        pytest.skip("no address space for a tensor of 10 GiB")
    q, k, v = (torch.as_strided(memory, (1, 1, queries, size), (1, 1, stride, 1), 16 * i) for i in range(3))
    assert (queries - 1) * stride > 2**31
    for x in (q, k, v):
        x.copy_(torch.randn(1, 1, queries, size))
    check_dense(q, k, v, [Segment(0, 0, queries, 0, queries)])
