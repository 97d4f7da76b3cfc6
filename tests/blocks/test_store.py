"""Activation stores: exact values back, privacy of the files, nothing left behind, clear refusals.

What needs a process of its own (kill -9, another user, a tiny file system, resident memory) runs a short script through
`run_script`; the script gets the folder as ``d``.
"""

import copy
import errno
import gc
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_memeff.blocks import store as store_module
from hf_memeff.blocks.store import ActivationStoreError, CpuStore, DiskStore, MemoryStore, default_directory, make_store
from hf_memeff.memory import measure_peak_memory, saved_tensor_bytes

CPU = torch.device("cpu")
MIB = 2**20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
unix_only = pytest.mark.skipif(sys.platform == "win32", reason="the disk store refuses Windows")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

pytestmark = unix_only


@pytest.fixture(params=["unnamed", "named for an instant"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    """A disk store, with and without O_TMPFILE."""
    if request.param != "unnamed":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return make_store("disk", tmp_path / "activations", blocks=4)


def mappings(directory: str) -> int:
    return sum(directory in line for line in Path("/proc/self/maps").read_text().splitlines())


PREAMBLE = """
import importlib.util, os, sys, torch
spec = importlib.util.spec_from_file_location("store", sys.argv[1])
store_module = sys.modules["store"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(store_module)
from store import *
d = sys.argv[2]
"""


def start_script(body: str, directory: Path, *prefix: str) -> subprocess.Popen:
    # The module is loaded by itself, as it needs torch alone: importing the package takes seconds more.
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PREAMBLE + body, store_module.__file__, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(body: str, directory: Path, *prefix: str) -> str:
    process = start_script(body, directory, *prefix)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


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


@linux_only
def test_resident_memory_is_file_cache(tmp_path):
    if store_module._file_system(str(tmp_path)) in store_module._RAM_FILE_SYSTEMS:
        pytest.skip("the temporary folder is in RAM")
    out = run_script(
        """
def resident():
    lines = open("/proc/self/status").read().splitlines()
    kib = {l.split(":")[0]: int(l.split()[1]) for l in lines if l.startswith("Rss")}
    return (kib["RssAnon"] + kib["RssShmem"]) / 1024, kib["RssFile"] / 1024
store = make_store("disk", d)
hidden = torch.randn(4 * 2**20)
store.put(hidden[:2**10]).sum()
before = resident()
saved = [store.put(hidden, 6 - i) for i in range(6)]
assert all(torch.equal(store.get(s, torch.device("cpu")), hidden) for s in saved)
print(*(now - then for now, then in zip(resident(), before)))
""",
        tmp_path,
    )
    anonymous_mib, file_mib = map(float, out.split())
    assert anonymous_mib < 4  # one of the six inputs of 16 MiB would show
    assert file_mib > 90


# --- privacy and cleaning up -----------------------------------------------------------------------------------------


def test_modes_of_folder_and_file(tmp_path, monkeypatch):
    descriptors = []
    reserve = store_module._reserve
    monkeypatch.setattr(store_module, "_reserve", lambda fd, n: (descriptors.append(os.fstat(fd)), reserve(fd, n)))
    previous = os.umask(0)
    try:
        for flag in ("with O_TMPFILE", "without"):
            if flag == "without":
                monkeypatch.delattr(os, "O_TMPFILE", raising=False)
            store = make_store("disk", tmp_path / flag / "activations")
            assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700
    finally:
        os.umask(previous)
    assert len(descriptors) == 2
    for info in descriptors:
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_nlink == 0  # no name, before a byte was written


@pytest.mark.usefixtures("disk")  # with and without O_TMPFILE
def test_a_users_open_folder_keeps_its_mode_and_shows_no_file(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    store = make_store("disk", shared)
    saved = store.put(torch.randn(100))
    assert os.listdir(shared) == []
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    assert saved.shape == (100,)


def test_a_file_system_without_modes_is_refused(tmp_path, monkeypatch):
    store = make_store("disk", tmp_path)
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    mode = os.fstat(0).st_mode | 0o044
    with monkeypatch.context() as context:
        context.setattr(os, "fstat", lambda descriptor: types.SimpleNamespace(st_mode=mode))
        with pytest.raises(ActivationStoreError, match=r"ignores file modes.*Fix.*activation_store_dir"):
            store.put(torch.ones(3))
    assert os.listdir(tmp_path) == []


@linux_only
def test_kill_9_leaves_nothing(tmp_path):
    script = """
store = make_store("disk", d)
saved = [store.put(torch.randn(1000))]
if hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE
saved.append(store.put(torch.randn(1000)))
print(sum(d in line for line in open("/proc/self/maps")), flush=True)
sys.stdin.read()
"""
    process = start_script(script, tmp_path)
    try:
        assert process.stdout.readline() == "2\n"  # both are mapped now
        assert os.listdir(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    assert os.listdir(tmp_path) == []


def test_two_processes_share_a_folder(tmp_path):
    script = """
store = make_store("disk", d, 8)
hidden = [torch.full((5000,), float(os.getpid() * 10 + i)) for i in range(8)]
saved = [store.put(h, 8 - i) for i, h in enumerate(hidden)]
print("stored", flush=True)
sys.stdin.readline()
assert all(torch.equal(store.get(s, torch.device("cpu")), h) for s, h in zip(saved, hidden))
print("same")
"""
    both = [start_script(script, tmp_path) for _ in range(2)]
    try:
        assert [process.stdout.readline() for process in both] == ["stored\n"] * 2
        results = [process.communicate("go\n", timeout=60) for process in both]
        assert [out for out, _ in results] == ["same\n"] * 2, results
    finally:
        for process in both:
            process.kill()
            process.wait()


# --- the folder ------------------------------------------------------------------------------------------------------


def test_default_folder_is_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_mount_table", lambda: ["1 0 8:1 / / rw - ext4 /dev/sda1 rw"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = make_store("disk")
    assert store.directory == default_directory() == str(tmp_path / "cache" / "hf_memeff" / "activations")
    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700
    os.chmod(store.directory, 0o755)
    make_store("disk")
    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setattr(sys, "platform", "linux")
        assert default_directory() == str(tmp_path / ".cache" / "hf_memeff" / "activations")
        monkeypatch.setattr(sys, "platform", "darwin")
        assert default_directory() == str(tmp_path / "Library" / "Caches" / "hf_memeff" / "activations")


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_default_folder_in_ram_is_refused_and_a_named_one_taken(tmp_path, monkeypatch, kind):
    cache = tmp_path / "my cache"
    table = [
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        f"2 1 0:9 / {str(cache).replace(' ', chr(92) + '040')} rw - {kind} x rw",
    ]
    monkeypatch.setattr(store_module, "_mount_table", lambda: table)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with pytest.raises(
        ActivationStoreError, match=rf"got a {kind} file system, which is RAM.*Fix.*activation_store_dir"
    ):
        make_store("disk")
    assert not cache.exists()
    assert make_store("disk", cache / "named").put(torch.ones(3)).sum() == 3


def test_file_system_is_that_of_the_deepest_and_last_mount(monkeypatch):
    table = [
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw",
        "2 1 0:5 / /home rw - xfs /dev/sdb rw",
        "3 2 0:6 / /home/a/.cache rw shared:7 master:2 - nfs4 host:/x rw",
        "4 2 0:7 / /home/a/.cache rw - tmpfs tmpfs rw",
    ]
    monkeypatch.setattr(store_module, "_mount_table", lambda: table)
    cases = {"/home/a/.cache/x": "tmpfs", "/home/a/.cached": "xfs", "/home": "xfs", "/homes": "ext4", "/": "ext4"}
    assert {path: store_module._file_system(path) for path in cases} == cases
    monkeypatch.setattr(store_module, "_mount_table", list)
    assert store_module._file_system("/home") is None


@linux_only
def test_file_system_of_this_machine():
    assert store_module._file_system("/proc/self") == "proc"


# --- refusals --------------------------------------------------------------------------------------------------------


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


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ActivationStoreError, match=r"activation store in .*expected a folder.*Fix") as caught:
            make_store("disk", path)
        assert isinstance(caught.value.__cause__, OSError)
    assert (tmp_path / "file").read_text() == "mine"


@linux_only
def test_an_unwritable_folder_is_refused(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    out = run_script(
        """
if os.getuid() == 0:
    os.setuid(65534)
for path in (d, os.path.join(d, "new")):
    try:
        make_store("disk", path)
    except ActivationStoreError as error:
        print(error)
""",
        locked,
    )
    lines = out.splitlines()
    assert len(lines) == 2
    assert all("Permission denied" in line and "expected" in line and "activation_store_dir" in line for line in lines)


def statvfs(free_bytes: int, blocks: int = 1000) -> types.SimpleNamespace:
    return types.SimpleNamespace(f_bavail=free_bytes // 512, f_frsize=512, f_blocks=blocks)


def test_room_is_checked_for_the_whole_step_before_anything_is_written(tmp_path, monkeypatch):
    store, hidden = make_store("disk", tmp_path), torch.randn(1024)
    opened = []
    monkeypatch.setattr(store_module, "_open_unnamed", lambda directory: opened.append(directory))
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(3 * hidden.nbytes))
    with pytest.raises(ActivationStoreError, match=r"got 12,288 bytes free, expected 16,384 for.*one step\. Fix"):
        store.put(hidden, remaining=4)
    assert opened == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(3 * hidden.nbytes))
    assert torch.equal(store.put(hidden, remaining=3), hidden)
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(0, blocks=0))  # sizes unknown
    assert torch.equal(store.put(hidden, remaining=4), hidden)


def test_a_full_folder_is_refused_by_make_store(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(0))
    with pytest.raises(ActivationStoreError, match=r"got 0 bytes free, expected .*Fix"):
        make_store("disk", tmp_path)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate")
def test_a_disk_that_fills_up_is_an_error_of_put_and_leaks_nothing(tmp_path, monkeypatch):
    store, hidden = make_store("disk", tmp_path), torch.randn(1024)
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ActivationStoreError, match=r"got No space left on device, expected 4,096 bytes.*Fix") as caught:
        store.put(hidden)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate")
def test_a_file_system_that_cannot_reserve_is_used_all_the_same(tmp_path, monkeypatch):
    def unsupported(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    hidden = torch.randn(1024)
    assert torch.equal(make_store("disk", tmp_path).put(hidden), hidden)


def test_a_file_system_whose_mappings_show_other_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_map_file", lambda directory, host: torch.zeros_like(host))
    with pytest.raises(ActivationStoreError, match=r"other bytes through a mapping.*Fix"):
        make_store("disk", tmp_path)


def test_the_systems_file_size_limit_is_an_error_and_no_signal(tmp_path):
    out = run_script(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
store = make_store("disk", d)
assert torch.equal(store.put(torch.ones(16384)), torch.ones(16384))
try:
    store.put(torch.ones(16385))
except ActivationStoreError as error:
    print(error)
""",
        tmp_path,
    )
    assert "File too large" in out
    assert "Fix" in out


@linux_only
def test_a_really_full_disk(tmp_path):
    """A tmpfs of 1 MiB in a mount namespace of its own: it goes away with the process."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "
    isolated = [unshare or "", *([] if os.getuid() == 0 else ["-r"]), "-m", "sh", "-c", mount + '"$@"', "sh"]
    if not unshare or subprocess.run([*isolated, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to mount a tmpfs")
    out = run_script(
        """
def refused(work):
    try:
        work()
    except ActivationStoreError as error:
        print(str(error).replace(d, ""))
refused(lambda: make_store("disk", d, blocks=257))
store = make_store("disk", d, blocks=10)
hidden = torch.randn(75000)
refused(lambda: store.put(hidden, remaining=4))
saved = [store.put(hidden, 3 - i) for i in range(3)]
refused(lambda: store.put(hidden))
store_module._require_space = lambda *arguments: None
refused(lambda: store.put(hidden))
del os.posix_fallocate
refused(lambda: store.put(hidden))
assert all(torch.equal(s, hidden) for s in saved)
saved.clear()
assert torch.equal(store.put(hidden), hidden)
""",
        tmp_path,
        *isolated,
    )
    got = [re.search(r"got (.*?), expected", line)[1] for line in out.splitlines()]
    assert len(got) == 5
    assert got[0] == got[1] == "1,048,576 bytes free"
    assert got[2].endswith(" bytes free")
    assert (
        got[3] == got[4] == "No space left on device"
    )  # the reservation; then the write, as where nothing can reserve


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
