"""The torch backend against the reference, dense attention and its own promises, at odd sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_memeff.ops.anchor import sweep
from hf_memeff.ops.anchor.tiling import Segment
from ops.anchor._inputs import INF, SUPERBLOCK, counts, dense, inputs, kept_sets, run, settings, whole

FP32 = 1e-5


@pytest.mark.parametrize("queries", [1, 7, 31, 32, 33, 63, 64, 65, 96, 97, 129, 135])
@pytest.mark.parametrize("batch,heads,groups", [(1, 1, 1), (2, 3, 1), (3, 8, 1), (1, 8, 8)])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_infinite_theta_is_dense_attention(backend: str, batch: int, heads: int, groups: int, queries: int) -> None:
    q, k, v = inputs(batch, heads, groups, queries)
    result = run(backend, q, k, v, settings(theta=INF))
    torch.testing.assert_close(result.out, dense(q, k, v), rtol=0, atol=FP32)
    assert result.kept == result.candidates
    assert (result.sparse_tiles > 0) == (queries > SUPERBLOCK)
    assert result.dense_tiles == 0


@pytest.mark.parametrize("offset", [1, 5, 31, 32, 40, 100])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_infinite_theta_is_dense_attention_after_earlier_keys(backend: str, offset: int) -> None:
    q, k, v = inputs(2, 4, 2, 70, offset)
    result = run(backend, q, k, v, settings(theta=INF))
    torch.testing.assert_close(result.out, dense(q, k, v), rtol=0, atol=FP32)


@pytest.mark.parametrize("theta", [4.0, 2.0, 0.5, -0.5])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_keep": 5},
        {"dense_tail": 40},
        {"init_blocks": 0},
        {"init_blocks": 3},
        {"step": 1},
        {"dense_above": 0.5},
        {"dense_above": 0.0},
    ],
    ids=str,
)
def test_keeps_what_the_reference_keeps(theta: float, changes: dict) -> None:
    config = settings(theta=theta, **changes)
    for seed, (heads, groups, queries, offset) in enumerate([(3, 1, 333, 0), (4, 2, 130, 77), (2, 2, 129, 3)]):
        q, k, v = inputs(2, heads, groups, queries, offset, seed=seed)
        found, expected = run("torch", q, k, v, config), run("reference", q, k, v, config)
        assert kept_sets(found) == kept_sets(expected)
        assert counts(found) == counts(expected)
        torch.testing.assert_close(found.out, expected.out, rtol=0, atol=FP32)
        torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=FP32)


def test_output_is_a_masked_softmax_over_the_kept_set() -> None:
    q, k, v = inputs(queries=200)
    config = settings(theta=1.0)
    result = run("torch", q, k, v, config)
    assert 0 < result.kept < result.candidates
    position = torch.arange(200)
    expected = torch.empty_like(result.out)
    for head in range(2):
        seen = torch.zeros(200, 200, dtype=torch.bool)
        for row in range(200):
            base = row // SUPERBLOCK * SUPERBLOCK
            last = max(config.block_size, base - config.block_size)
            seen[row] = (position < config.block_size) | (position >= last)
            seen[row, kept_sets(result).get((0, head, base), [])] = True
        seen &= position <= position[:, None]
        scores = (q[0, head] @ k[0, 0].T / 4).masked_fill(~seen, -torch.inf)
        expected[0, head] = scores.softmax(-1) @ v[0, 0]
    torch.testing.assert_close(result.out, expected, rtol=0, atol=FP32)


def test_a_kept_key_moves_the_output_and_a_dropped_one_does_not() -> None:
    q, k, v = inputs(heads=1, queries=200)
    config = settings(theta=2.0)
    before = run("torch", q, k, v, config)
    start = 160
    kept = set(kept_sets(before)[0, 0, start])
    candidates = set(range(config.block_size, start - config.block_size))
    assert kept and candidates - kept
    for key, moves in ((min(kept), True), (min(candidates - kept), False)):
        changed = v.clone()
        changed[0, 0, key] += 10
        after = run("torch", q, k, changed, config).out[0, 0, start : start + SUPERBLOCK]
        assert (not torch.equal(after, before.out[0, 0, start : start + SUPERBLOCK])) == moves


@pytest.mark.parametrize(
    "size,width", [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (12, 20)]
)
def test_c63_any_head_size_and_values_of_another(size: int, width: int) -> None:
    q, k, v = inputs(heads=2, queries=100, size=size, width=width)
    result = run("torch", q, k, v, settings(theta=INF))
    assert result.out.shape == (1, 2, 100, width)
    torch.testing.assert_close(result.out, dense(q, k, v), rtol=0, atol=FP32)
    found, expected = (run(name, q, k, v, settings(theta=1.0)) for name in ("torch", "reference"))
    assert kept_sets(found) == kept_sets(expected)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=FP32)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_c64_each_group_of_heads_reads_its_own_keys(groups: int) -> None:
    q, k, v = inputs(heads=8, groups=groups, queries=100)
    v = torch.arange(groups, dtype=torch.float32)[None, :, None, None].expand_as(v)
    out = run("torch", q, k, v, settings(theta=1.0)).out
    expected = torch.arange(8).div(8 // groups, rounding_mode="floor").float()
    torch.testing.assert_close(out, expected[None, :, None, None].expand_as(out), rtol=0, atol=FP32)


def test_c55_a_row_of_a_batch_is_that_row_alone() -> None:
    lengths = [100, 33, 77]
    q, k, v = inputs(3, 4, 2, 100)
    segments = [Segment(row, 100 - n, n, 100 - n, n) for row, n in enumerate(lengths)]
    together = run("torch", q, k, v, settings(theta=1.0), segments)
    for row, n in enumerate(lengths):
        alone = run("torch", *(x[row : row + 1, :, 100 - n :] for x in (q, k, v)), settings(theta=1.0))
        torch.testing.assert_close(together.out[row, :, 100 - n :], alone.out[0], rtol=0, atol=FP32)
        assert not together.out[row, :, : 100 - n].any()
        mine = {key[1:]: kept for key, kept in kept_sets(together).items() if key[0] == row}
        assert mine == {key[1:]: kept for key, kept in kept_sets(alone).items()}


@pytest.mark.parametrize("real", [1, 2, 63, 64, 65, 127, 129, 200])
def test_c56_what_is_behind_the_last_token_does_not_matter(real: int) -> None:
    q, k, v = inputs(queries=210)
    alone = run("torch", *(x[:, :, :real] for x in (q, k, v)), settings(theta=1.0))
    for x in (q, k, v):
        x[:, :, real:] = torch.nan
    padded = run("torch", q, k, v, settings(theta=1.0), [Segment(0, 0, real, 0, real)])
    assert torch.equal(padded.out[:, :, :real], alone.out)
    assert not padded.out[:, :, real:].any()


def test_packed_sequences_are_attended_each_by_itself() -> None:
    q, k, v = inputs(queries=7 + 133 + 20)
    borders = [0, 7, 140, 160]
    segments = [Segment(0, a, b - a, a, b - a) for a, b in itertools.pairwise(borders)]
    result = run("torch", q, k, v, settings(theta=1.0), segments)
    for a, b in itertools.pairwise(borders):
        alone = run("torch", *(x[:, :, a:b] for x in (q, k, v)), settings(theta=1.0))
        torch.testing.assert_close(result.out[:, :, a:b], alone.out, rtol=0, atol=FP32)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_sink_takes_its_share_of_every_row(backend: str) -> None:
    q, k, v = inputs(heads=2, queries=100)
    sinks = torch.tensor([0.5, -1.0])
    result = run(backend, q, k, v, settings(theta=INF), sinks=sinks)
    scores = (q @ k.transpose(2, 3) / 4).masked_fill(~torch.ones(100, 100, dtype=torch.bool).tril(), -torch.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 2, 100, 1)], -1)
    torch.testing.assert_close(result.out, scores.softmax(-1)[..., :-1] @ v, rtol=0, atol=FP32)
    torch.testing.assert_close(result.lse, scores.logsumexp(-1), rtol=0, atol=FP32)


# half precision rounds q, k and v the same way for both; what differs is the output's own rounding
@pytest.mark.parametrize("dtype,atol", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)])
def test_other_dtypes_keep_their_dtype_and_their_kept_sets(dtype: torch.dtype, atol: float) -> None:
    q, k, v = inputs(1, 4, 2, 200, dtype=dtype)
    found, expected = (run(name, q, k, v, settings(theta=1.0)) for name in ("torch", "reference"))
    assert found.out.dtype == dtype and found.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert kept_sets(found) == kept_sets(expected)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=atol)


def test_without_the_cpu_kernel_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 4, 2, 150, 20, size=16, width=24)
    sinks = torch.randn(4)
    expected = run("torch", q, k, v, settings(theta=1.0), sinks=sinks)
    monkeypatch.setattr("hf_memeff.ops.anchor.parts.flash_forward", lambda *args, **kwargs: None)
    found = run("torch", q, k, v, settings(theta=1.0), sinks=sinks)
    assert kept_sets(found) == kept_sets(expected)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=FP32)
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=FP32)


def test_tiles_of_scores_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 4, 2, 150, 20)
    expected = run("torch", q, k, v, settings(theta=1.0))
    for rows, columns in ((16, 24), (64, 37)):
        monkeypatch.setattr(sweep, "ROWS", rows)
        monkeypatch.setattr(sweep, "COLUMNS", columns)
        torch.testing.assert_close(run("torch", q, k, v, settings(theta=1.0)).out, expected.out, rtol=0, atol=FP32)


def test_nothing_is_read_from_uninitialised_memory(poisoned: None) -> None:
    q, k, v = inputs(2, 4, 2, 150, 20)
    result = run("torch", q, k, v, settings(theta=1.0), [Segment(0, 10, 140, 5, 165), Segment(1, 0, 150, 0, 170)])
    assert result.out.isfinite().all()


def test_large_scores_stay_finite() -> None:
    q, k, v = inputs(queries=130)
    result = run("torch", q * 300, k, v, settings(theta=INF))
    # scores of 2000 are themselves known to 1e-4
    torch.testing.assert_close(result.out, dense(q * 300, k, v), rtol=0, atol=1e-3)


def test_max_keep_takes_the_highest_margins() -> None:
    q, k, v = inputs(heads=1, queries=100)
    every = run("torch", q, k, v, settings(theta=INF))
    for keep in (1, 3):
        few = run("torch", q, k, v, settings(theta=INF, max_keep=keep))
        assert few.kept == keep * few.sparse_tiles < every.kept


def test_thetas_are_per_head() -> None:
    q, k, v = inputs(heads=3, queries=200)
    result = run("torch", q, k, v, settings(), thetas=[INF, -1e4, 1.0])
    sizes = [sum(len(kept) for key, kept in kept_sets(result).items() if key[1] == head) for head in range(3)]
    assert sizes[0] == result.candidates // 3 and sizes[1] == 0 and 0 < sizes[2] < sizes[0]


def test_c70_strides_above_32_bits() -> None:
    queries, size = 70, 8
    stride = 2**31 // 64
    try:
        memory = torch.empty(stride * queries + size)
    except RuntimeError:
        pytest.skip("no address space for a tensor of 9 GiB")
    q, k, v = (torch.as_strided(memory, (1, 1, queries, size), (1, 1, stride, 1), 16 * i) for i in range(3))
    assert (queries - 1) * stride > 2**31
    for x in (q, k, v):
        x.copy_(torch.randn(1, 1, queries, size))
    result = run("torch", q, k, v, settings(theta=INF))
    torch.testing.assert_close(result.out, dense(*(x.contiguous() for x in (q, k, v))), rtol=0, atol=FP32)


def test_temporaries_do_not_grow_with_the_square_of_the_length() -> None:
    peaks = []
    for queries in (1024, 2048):
        q, k, v = inputs(heads=4, groups=2, queries=queries)
        config = settings(theta=INF, block_size=32, step=8)
        run("torch", q, k, v, config)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            run("torch", q, k, v, config, whole(q, k))
        held = top = 0
        for event in sorted(
            (e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
        ):
            held += event.nbytes()
            top = max(top, held)
        peaks.append(top)
    assert peaks[1] < 2.5 * peaks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,atol", [(torch.float32, FP32), (torch.bfloat16, 2e-2)])
def test_on_a_gpu(dtype: torch.dtype, atol: float) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        q, k, v = (x.cuda() for x in inputs(2, 4, 2, 200, 33, size=16, width=24, dtype=dtype))
        found, expected = (run(name, q, k, v, settings(theta=1.0)) for name in ("torch", "reference"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert kept_sets(found) == kept_sets(expected)
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=atol)
