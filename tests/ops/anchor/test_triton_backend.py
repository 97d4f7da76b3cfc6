"""The Triton backend: results in the interpreter, refusals, and, on a GPU, results, memory and speed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memeff.ops.anchor import dispatch, triton_backend
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.result import AnchorResult
from hf_memeff.ops.anchor.tiling import segment_tiles
from ops.anchor._inputs import INF, counts, dense, inputs, kept_sets, run, settings, whole

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
@pytest.mark.parametrize(
    "chosen", ["not slow", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_results_in_the_interpreter(chosen: str) -> None:
    tests = [str(Path(__file__).with_name("triton_interpreted.py")), "-m", chosen]
    command = [sys.executable, "-m", "pytest", *tests, "-n", "0", "-q", "--noconftest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def test_it_is_the_default_where_its_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1)
    assert dispatch.backend_name(settings()) == dispatch.backend_name(settings(), q) == "torch"
    monkeypatch.setattr(triton_backend, "runs_on", lambda tensor: tensor is q)
    monkeypatch.setattr(triton_backend, "is_available", lambda: True)
    assert dispatch.backend_name(settings(), q) == "triton"
    assert dispatch.backend_name(settings(backend="torch"), q) == "torch"
    monkeypatch.setattr(triton_backend, "is_available", lambda: False)
    assert dispatch.backend_name(settings(), q) == "torch"


def test_asking_for_it_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        dispatch.backend_name(settings(backend="triton"))


@needs_triton
@pytest.mark.parametrize("dtype,match", [(torch.float32, "tensors on cpu"), (torch.float64, "torch.float64")])
def test_tensors_that_it_has_no_kernel_for(dtype: torch.dtype, match: str) -> None:
    q, k, v = inputs(queries=50, dtype=dtype)
    with pytest.raises(ValueError, match=match + r".*backend='torch'"):
        run("triton", q, k, v, settings(backend="triton"))


def masked_softmax(
    q: Tensor, k: Tensor, v: Tensor, config: AnchorAttentionConfig, result: AnchorResult
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over init, local and the kept keys of a result, in float64."""
    kept = kept_sets(result)
    seen = torch.ones(*q.shape[:2], q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    for number, segment in enumerate(whole(q, k)):
        for tile in segment_tiles(segment, config):
            rows = slice(tile.start - segment.offset, tile.stop - segment.offset)
            if not tile.candidates:
                continue
            for head in range(q.shape[1]):
                seen[segment.batch, head, rows, tile.first_candidate : tile.last_candidate] = False
                seen[segment.batch, head, rows, kept[number, head, tile.start]] = True
    seen &= torch.ones_like(seen[0, 0]).tril(k.shape[2] - q.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for x in (k, v))
    scores = (q.double() @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check(q: Tensor, k: Tensor, v: Tensor, config: AnchorAttentionConfig, atol: float) -> None:
    """Kept sets are the reference's but for keys within 1e-4 of the threshold, and attention is over what is kept."""
    theta = float(config.theta)
    found = run("triton", q, k, v, config)
    fewer, more = (
        kept_sets(run("reference", q, k, v, config, thetas=[theta + by] * q.shape[1])) for by in (-1e-4, 1e-4)
    )
    for key, kept in kept_sets(found).items():
        assert kept == sorted(set(kept)) and set(fewer[key]) <= set(kept) <= set(more[key])
    out, lse = masked_softmax(q, k, v, config, found)
    torch.testing.assert_close(found.out.double(), out, rtol=0, atol=atol)
    torch.testing.assert_close(found.lse.double(), lse, rtol=0, atol=1e-4)


# half precision: q, k and v are what they are in both, weights and the output are rounded
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads,groups", [(2, 2), (3, 1), (8, 1)])
@pytest.mark.parametrize("size,width", [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256)])
def test_gpu_heads_and_sizes(size: int, width: int, heads: int, groups: int, dtype: torch.dtype) -> None:
    q, k, v = (x.cuda() for x in inputs(2, heads, groups, 700, 77, size, width, dtype))
    for theta in (INF, 3.0, 1.0):
        config = settings(theta=theta, block_size=16, step=8)
        check(q, k, v, config, TOLERANCE[dtype])
        check(q, k, v, settings(theta=theta, dense_tail=40, init_blocks=3, step=5), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 127, 129, 2048, 2049, 4096, 6151])
def test_gpu_infinite_theta_is_dense_attention(queries: int) -> None:
    q, k, v = (x.cuda() for x in inputs(1, 3, 1, queries, size=64))
    result = run("triton", q, k, v, AnchorAttentionConfig(theta=INF, min_length=1, dense_above=None))
    torch.testing.assert_close(result.out.cpu(), dense(q.cpu(), k.cpu(), v.cpu()), rtol=0, atol=1e-5)
    assert result.kept == result.candidates and (result.sparse_tiles > 0) == (queries > 2048)


@pytest.mark.gpu
def test_gpu_max_keep_dense_share_and_sinks() -> None:
    q, k, v = (x.cuda() for x in inputs(2, 4, 2, 700, size=64))
    sinks = torch.randn(4).cuda()
    for changes in ({"max_keep": 7}, {"max_keep": 7, "theta": INF}, {"dense_above": 0.3}):
        config = settings(**{"theta": 2.0, **changes})
        found, expected = (run(name, q, k, v, config, sinks=sinks) for name in ("triton", "reference"))
        assert kept_sets(found) == kept_sets(expected) and counts(found) == counts(expected)
        torch.testing.assert_close(found.out, expected.out, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_gpu_strides_above_32_bits() -> None:
    queries, size = 300, 64
    stride = 2**31 // 256
    if torch.cuda.mem_get_info()[0] < stride * queries * 2 + 2**30:
        pytest.skip("needs 6 GiB")
    memory = torch.empty(stride * queries + 512, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.as_strided(memory, (1, 1, queries, size), (1, 1, stride, 1), 64 * i) for i in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(1, 1, queries, size))
    check(q, k, v, settings(theta=INF), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [32768, 131072])
def test_gpu_memory_and_speed_against_sdpa(queries: int) -> None:
    """At a density of about 5 %, with the heads of an 8B model; ``pytest -s`` shows the figures."""
    q, k, v = (torch.randn(1, heads, queries, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    config = AnchorAttentionConfig(min_length=1, dense_above=None)
    low, high = -5.0, 20.0
    for _ in range(12):
        theta = (low + high) / 2
        result = run("triton", q, k, v, config, thetas=[theta] * 32)
        low, high = (theta, high) if result.kept < 0.05 * result.candidates else (low, theta)
    density = result.kept / result.candidates
    assert 0.02 < density < 0.1
    own = result.out.nbytes + result.lse.nbytes
    del result

    def call() -> None:
        triton_backend.anchor_attention(
            q, k, v, segments=whole(q, k), thetas=[theta] * 32, config=config, scale=128**-0.5
        )

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    extra = torch.cuda.max_memory_allocated() - before - own
    assert extra <= 0.25 * q.nbytes
    anchor_ms = _milliseconds(call)
    sdpa_ms = _milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    print(f"{queries} tokens: density {density:.3f}, anchor {anchor_ms:.2f} ms, sdpa {sdpa_ms:.2f} ms, {extra=} bytes")
    assert anchor_ms < sdpa_ms


def _milliseconds(call) -> float:
    """Median of ten, after two that are not counted."""
    times = []
    for turn in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]
