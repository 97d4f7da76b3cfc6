"""The disk store's folder: which one is used, private files, nothing left behind, clear errors when it cannot be used.

What needs a process of its own (kill -9, another user, a tiny file system, resident memory) runs a short script through
`run_script`; the script gets the folder as ``d``.
"""

import errno
import gc
import os
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

from hf_memeff.blocks import store as store_module
from hf_memeff.blocks.store import ActivationStoreError, default_directory, make_store

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the disk store refuses Windows")


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


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_users_open_folder_keeps_its_mode_and_shows_no_file(tmp_path, monkeypatch, unnamed):
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
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


# --- which folder ----------------------------------------------------------------------------------------------------


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
