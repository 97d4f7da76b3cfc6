"""Activation stores: exact values, through autograd too, and memory that is freed (folders: `test_store_folder.py`)."""

import copy
import os
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_memeff.blocks import store as store_module
from hf_memeff.blocks.store import ActivationStoreError, CpuStore, DiskStore, MemoryStore, make_store
from hf_memeff.memory import measure_peak_memory, saved_tensor_bytes

CPU = torch.device("cpu")
MIB = 2**20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the disk store refuses Windows")


@pytest.fixture(params=["unnamed", "named for an instant"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    """A disk store, with and without O_TMPFILE."""
    if request.param != "unnamed":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return make_store("disk", tmp_path / "activations", blocks=4)


def mappings(directory: str) -> int:
    return sum(directory in line for line in Path("/proc/self/maps").read_text().splitlines())


class Square(torch.autograd.Function):
    """x squared, its input kept by a store: the way the engine uses one."""

    @staticmethod
    def forward(ctx, x, store, remaining):
        ctx.store, ctx.device = store, x.device
        ctx.save_for_backward(store.put(x, remaining))
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.store.get(*ctx.saved_tensors, ctx.device), None, None


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (2, 3, 5), (1, 1025, 7), (0, 16), (2, 0, 3), ()])
def test_disk_gives_back_every_bit(disk, dtype, shape):
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = disk.get(disk.put(hidden, remaining=3), CPU)
    assert (back.shape, back.dtype, back.device) == (hidden.shape, dtype, CPU)
    assert torch.equal(back, hidden)


def test_disk_keeps_special_values_bit_for_bit(disk):
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1, 0x7F7FFFFF], dtype=torch.int32)  # NaN payload, inf, -0
    assert torch.equal(disk.get(disk.put(bits.view(torch.float32)), CPU).view(torch.int32), bits)


def test_disk_takes_any_layout(disk):
    base = torch.randn(6, 8, 10)
    for hidden in (base.transpose(0, 2), base[:, ::2], base[1:, 3:5, 2:], base[:1].expand(4, 8, 10)):
        assert torch.equal(disk.get(disk.put(hidden), CPU), hidden)


def test_disk_copies_the_values_of_now_and_is_no_part_of_the_graph(disk):
    hidden = torch.ones(9, requires_grad=True) * 3
    saved = disk.put(hidden)
    with torch.no_grad():
        hidden.zero_()
    assert not saved.requires_grad
    assert torch.equal(saved, torch.full((9,), 3.0))


@pytest.mark.parametrize("kind", ["memory", "cpu"])
def test_memory_and_cpu_keep_a_cpu_tensor_itself(kind):
    store, hidden = make_store(kind), torch.randn(3, requires_grad=True)
    assert store.put(hidden) is hidden
    assert store.get(hidden, CPU) is hidden


@pytest.mark.parametrize("kind", ["memory", "cpu", "disk"])
def test_gradients_are_exact_in_two_backward_passes_and_under_saved_tensor_hooks(kind, tmp_path):
    store = make_store(kind, tmp_path if kind == "disk" else None)
    x = torch.randn(4, 33, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((x * x).exp().sum(), x)
    loss = Square.apply(x, store, 1).exp().sum()
    for retain in (True, False):
        (got,) = torch.autograd.grad(loss, x, retain_graph=retain)
        assert torch.equal(got, expected)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = Square.apply(x, store, 1).exp().sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


class Wrapped(Tensor):
    """A subclass, whose storage need not hold the values."""


@pytest.mark.parametrize("hidden", [torch.eye(3).to_sparse(), torch.ones(3).as_subclass(Wrapped)])
def test_other_tensors_than_plain_dense_ones_are_refused(hidden, tmp_path):
    with pytest.raises(TypeError, match=r"got a .*expected a plain dense tensor.*Fix"):
        make_store("disk", tmp_path).put(hidden)
    assert make_store("memory").put(hidden) is hidden


@pytest.mark.parametrize("kind", ["memory", "cpu", "disk"])
def test_stores_copy_and_pickle(kind, tmp_path):
    store = make_store(kind, tmp_path if kind == "disk" else None)
    hidden = torch.randn(5)
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert twin == store
        assert torch.equal(twin.get(twin.put(hidden), CPU), hidden)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_disk_takes_no_allocator_memory(disk):
    hidden = torch.randn(MIB)
    seen = measure_peak_memory(lambda: disk.get(disk.put(hidden), CPU), device="cpu")
    assert (seen.peak_bytes, seen.held_bytes) == (0, 0)
    assert torch.equal(seen.result, hidden)


def test_autograd_keeps_one_storage_per_input(disk):
    x = torch.randn(7, 11, requires_grad=True)
    assert saved_tensor_bytes(lambda: Square.apply(x, disk, 1)) == x.nbytes


@linux_only
def test_the_mapping_goes_when_autograd_drops_the_tensor(disk):
    x = torch.randn(64, requires_grad=True)
    assert mappings(disk.directory) == 0
    first, second = Square.apply(x, disk, 2).sum(), Square.apply(x, disk, 1).sum()
    descriptors = len(os.listdir("/proc/self/fd"))
    assert mappings(disk.directory) == 2
    first.backward()
    assert mappings(disk.directory) == 1  # a backward without retain_graph frees what it used
    del second
    assert mappings(disk.directory) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tape"}, r"activation_store got 'tape', expected one of \('memory', 'cpu', 'disk'\)\. Fix"),
        ({"kind": {"a": 1}}, r"activation_store got \{'a': 1\}, expected one of"),
        ({"kind": "memory", "directory": "/x"}, r"activation_store_dir got '/x' with .*'memory', expected None.*Fix"),
        ({"kind": "cpu", "directory": "/x"}, r"activation_store_dir got '/x' with .*'cpu', expected None.*Fix"),
        ({"kind": "disk", "directory": ""}, r"activation_store_dir got '', expected the path of a folder\. Fix"),
        ({"kind": "disk", "directory": "a\0b"}, r"expected the path of a folder\. Fix"),
        (
            {"kind": "disk", "directory": {"a": 1}},
            r"activation_store_dir got \{'a': 1\}, expected the path of a folder",
        ),
        ({"kind": "memory", "blocks": 0}, r"blocks=0, expected at least 1\. Fix"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_store(**arguments)


def test_messages_stay_short():
    for arguments in ({"kind": "x" * 10**7}, {"kind": "disk", "directory": "/tmp/" + "x" * 10**7}):
        with pytest.raises((ValueError, ActivationStoreError)) as caught:
            make_store(**arguments)
        assert len(str(caught.value)) < 800


def test_windows_is_refused_with_the_alternative(monkeypatch, tmp_path):
    monkeypatch.setattr(store_module, "sys", types.SimpleNamespace(platform="win32"))
    with pytest.raises(ValueError, match=r'"cpu" or "memory" on Windows.*Fix'):
        make_store("disk", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert isinstance(make_store("memory"), MemoryStore)
    assert isinstance(make_store("cpu"), CpuStore)


# --- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("hooks", [False, True])
def test_gpu_values_come_back_exactly_while_their_memory_is_reused(kind, hooks, tmp_path):
    store = make_store(kind, tmp_path if kind == "disk" else None, blocks=20)
    generator = torch.Generator("cuda").manual_seed(0)
    busy = torch.randn(4096, 4096, device="cuda")
    x = [torch.randn(512, 1024, device="cuda", generator=generator).requires_grad_() for _ in range(20)]
    losses = []
    for i, leaf in enumerate(x):
        busy = (busy @ busy).clamp(-1, 1)  # keeps the computing stream behind the host
        with torch.autograd.graph.saved_tensors_hooks(
            (lambda t: t.clone()) if hooks else (lambda t: t.detach()), lambda t: t
        ):
            hidden = leaf * 3  # freed after this round, so that the next one may reuse its memory
            losses.append(Square.apply(hidden, store, 20 - i).sum())
        del hidden
    for retain in (True, False):
        for leaf, loss in zip(x, losses, strict=True):
            (got,) = torch.autograd.grad(loss, leaf, retain_graph=retain)
            assert torch.equal(got, 6 * (leaf.detach() * 3))


@pytest.mark.gpu
@needs_cuda
def test_gpu_input_leaves_the_gpu_for_page_locked_memory():
    store = make_store("cpu")
    hidden = torch.randn(1024, 1024, device="cuda").t()
    saved = store.put(hidden)
    back = store.get(saved, hidden.device)
    assert saved.device == CPU
    assert saved.is_pinned()
    assert back.device == hidden.device
    assert torch.equal(back, hidden)
