"""Activation stores: where the input of each block waits for the backward pass.

A block's autograd Function calls `put` in its forward, hands what comes back to `save_for_backward`, and calls `get`
on it in its backward. Every store gives back the exact values, as often as backward runs. No store object refers to
what it stored, so memory, page-locked buffers and files are freed when autograd drops the saved tensor.

A store is a plain frozen value (copies, pickles); streams are looked up per device when they are needed.
What follows for GPU tensors has never been run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import re
import reprlib
import sys
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

STORE_KINDS = ("memory", "cpu", "disk")

_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "rootfs"})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
_FIX = (
    "Fix: make space or repair permissions there, name another folder with activation_store_dir, "
    'or set activation_store="cpu" (on a GPU) or "memory".'
)
_SHORT = reprlib.Repr()
_SHORT.maxstring = 300


class ActivationStoreError(OSError):
    """The folder of the disk store cannot hold the block inputs. The system's own error, if any, is its cause."""


class ActivationStore(ABC):
    """Keeps block inputs between forward and backward. Made by `make_store`."""

    kind: ClassVar[str]

    @abstractmethod
    def put(self, hidden: Tensor, remaining: int = 1) -> Tensor:
        """Take the values that `hidden` has now.

        Args:
            hidden: a block's input, any shape, layout and device. It must not be changed in place afterwards: the
                memory store shares it, and a copy from a GPU may still be under way.
            remaining: how many tensors of this size the step still has to store, this one included.

        Returns:
            The tensor to hand to `save_for_backward`. Keep no other reference to it.

        Raises:
            ActivationStoreError: the disk has no room for `remaining` such tensors, or refuses this one.
            TypeError: `hidden` is not a plain dense tensor and would have to be copied.
        """

    @abstractmethod
    def get(self, saved: Tensor, device: torch.device) -> Tensor:
        """The stored values, ready to compute with.

        Args:
            saved: what `put` returned, or what saved-tensor hooks made of it.
            device: the device that the block's input was on.

        Returns:
            A tensor of the shape and dtype that was stored. It may be the stored one itself: read only.
        """


@dataclass(frozen=True)
class MemoryStore(ActivationStore):
    """Keeps the block's input itself: its bytes stay allocated where it is."""

    kind: ClassVar[str] = "memory"

    def put(self, hidden: Tensor, remaining: int = 1) -> Tensor:
        return hidden

    def get(self, saved: Tensor, device: torch.device) -> Tensor:
        return saved.to(device)


@dataclass(frozen=True)
class CpuStore(ActivationStore):
    """Moves block inputs from a GPU to page-locked host memory, on a side stream while the block computes.

    Saved per block: the input's bytes of host memory, none on the GPU. An input that is on the CPU already is kept
    itself; one on another accelerator than CUDA (or ROCm) is copied without a side stream.
    """

    kind: ClassVar[str] = "cpu"

    def put(self, hidden: Tensor, remaining: int = 1) -> Tensor:
        if hidden.device.type == "cpu" or hidden.numel() == 0:
            return hidden
        _require_plain(hidden)
        source = hidden.detach()
        if source.device.type != "cuda":
            return source.to("cpu")
        side = _copy_stream(source.device.index)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            host.copy_(source, non_blocking=True)
        source.record_stream(side)  # the input may be freed before the copy has run
        if _saved_tensor_hooks_active():
            side.synchronize()  # a pack hook reads the host copy at once, from the host
        return host

    def get(self, saved: Tensor, device: torch.device) -> Tensor:
        if saved.device.type != "cpu" or device.type != "cuda":
            return saved.to(device)
        # The copy back runs on the computing stream, which needs the values now: a side stream would gain nothing and
        # would need the destination guarded against reuse. The host buffer is guarded by PyTorch's page-locked
        # allocator.
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.current_stream(index).wait_stream(_copy_stream(index))
        return saved.to(device, non_blocking=True)


@dataclass(frozen=True)
class DiskStore(ActivationStore):
    """Keeps block inputs in memory-mapped files without a name.

    Saved per block: one file of the input's bytes, one mapping and one file descriptor. What the mapping brings into
    memory is file cache (RssFile), which the system writes out and drops when memory is short. Each file goes away
    with its mapping, when autograd drops the tensor or the process ends in whatever way; blocks that are freed soon
    are often never written to the device at all.

    The values are users' text in another form: the file has mode 0600 and, except for the instant of its creation on
    systems without O_TMPFILE, no name that others could open. Hence runs and ranks can share a folder. The data is
    written through the file and not through the mapping: a disk that fills up is then an error of that write, where a
    store to a mapped page ends the process with SIGBUS, and it is also the faster way (2.3 MiB in 0.4 ms against 2.8
    ms on ext4). From a GPU the values pass through page-locked memory, and `put` waits for them.
    """

    directory: str
    kind: ClassVar[str] = "disk"

    def put(self, hidden: Tensor, remaining: int = 1) -> Tensor:
        if hidden.numel() == 0:
            return hidden
        _require_plain(hidden)
        try:
            _require_space(self.directory, hidden.nbytes * remaining)
            return _map_file(self.directory, _contiguous_on_host(hidden.detach()))
        except ActivationStoreError:
            raise
        except OSError as error:
            raise _unusable(
                self.directory, error.strerror or error, f"{hidden.nbytes:,} bytes in a file mapped into memory"
            ) from error

    def get(self, saved: Tensor, device: torch.device) -> Tensor:
        if saved.device.type != "cpu" or device.type != "cuda":
            return saved.to(device)
        return saved.pin_memory().to(device, non_blocking=True)


def make_store(kind: str, directory: str | os.PathLike[str] | None = None, blocks: int = 1) -> ActivationStore:
    """Make an activation store, refusing at once what would fail in the first step.

    For "disk" the folder is made if it is missing (mode 0700) and tried: `blocks` pages of space, one page written,
    mapped and compared. The mode of an existing folder that the user names is left alone; see `DiskStore` for why
    that is safe.

    Args:
        kind: "memory", "cpu" or "disk".
        directory: folder for "disk", relative to the working directory of now; None is `default_directory()`, which
            has to be on a disk. A folder in RAM (tmpfs) is taken only if named here. Elsewhere than on Linux it is
            not checked.
        blocks: how many tensors a step will store, at least 1.

    Returns:
        The store.

    Raises:
        ValueError: `kind` is unknown, "disk" on Windows, a directory for another kind or one that is no
            path, `blocks` < 1.
        ActivationStoreError: the folder is full, not a folder, not writable, or the default one is in RAM.
    """
    if kind not in STORE_KINDS:
        raise ValueError(
            f"activation_store got {_SHORT.repr(kind)}, expected one of {STORE_KINDS}. Fix: choose one of them."
        )
    if blocks < 1:
        raise ValueError(
            f"make_store got blocks={blocks}, expected at least 1. Fix: pass how many tensors a step stores."
        )
    if kind != "disk":
        if directory is not None:
            raise ValueError(
                f"activation_store_dir got {_SHORT.repr(directory)} with activation_store={kind!r}, expected None, "
                'since no folder is used. Fix: set activation_store="disk" or leave activation_store_dir out.'
            )
        return MemoryStore() if kind == "memory" else CpuStore()
    if sys.platform == "win32":
        raise ValueError(
            'activation_store got "disk", expected "cpu" or "memory" on Windows, where a mapped file keeps its name. '
            'Fix: set activation_store="cpu" (on a GPU) or "memory".'
        )
    store = DiskStore(_prepare_directory(directory))
    page = torch.arange(mmap.PAGESIZE, dtype=torch.int64, device="cpu").to(torch.uint8)
    if not torch.equal(store.put(page, remaining=blocks), page):
        raise _unusable(
            store.directory, "other bytes through a mapping than were written", "a file system that maps files"
        )
    return store


def user_cache_folder() -> Path | None:
    """This package's folder in the user's cache, which need not exist; None for a user without a home directory.

    That is hf_memeff in $XDG_CACHE_HOME if it is an absolute path, else in ~/Library/Caches on macOS and ~/.cache
    elsewhere; on Windows in %LOCALAPPDATA%.
    """
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    else:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(cache):  # the XDG specification says to ignore a relative path
            cache = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(cache) / "hf_memeff" if os.path.isabs(cache) else None


def default_directory() -> str:
    """Folder of the disk store when none is named: activations in `user_cache_folder()`.

    Raises:
        ActivationStoreError: the user has no home directory.
    """
    folder = user_cache_folder()
    if folder is None:
        raise _unusable("~", "no home directory for this user", "a cache folder")
    return str(folder / "activations")


def _prepare_directory(directory: str | os.PathLike[str] | None) -> str:
    """Absolute path of the folder, made if missing."""
    if directory is None:
        path = default_directory()
        file_system = _file_system(path)
        if file_system in _RAM_FILE_SYSTEMS:
            raise _unusable(
                path, f"a {file_system} file system, which is RAM", "a disk (a folder in RAM is used only if named)"
            )
    else:
        name = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(
                f"activation_store_dir got {_SHORT.repr(name)}, expected the path of a folder. "
                "Fix: name one, or leave it out."
            )
        path = os.path.abspath(os.path.expanduser(name))
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        # The default folder is this package's own, so a looser mode on it is a mistake; a user's folder is theirs.
        if directory is None and os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o700)
    except OSError as error:
        raise _unusable(path, error.strerror or error, "a folder, or a place to make one") from error
    return path


def _unusable(directory: str, got: object, expected: str) -> ActivationStoreError:
    return ActivationStoreError(f"activation store in {_SHORT.repr(directory)}: got {got}, expected {expected}. {_FIX}")


def _require_space(directory: str, needed_bytes: int) -> None:
    """Fail before the step and not in its middle; a later put still can, if another run takes the space."""
    stats = os.statvfs(directory)
    free_bytes = stats.f_bavail * stats.f_frsize
    # Some network and FUSE file systems report no sizes at all.
    if stats.f_blocks > 0 and free_bytes < needed_bytes:
        raise _unusable(directory, f"{free_bytes:,} bytes free", f"{needed_bytes:,} for the block inputs of one step")


def _map_file(directory: str, host: Tensor) -> Tensor:
    """Write a contiguous CPU tensor to a file without a name and map it; the mapping lives as long as the tensor."""
    nbytes = host.nbytes
    with os.fdopen(_open_unnamed(directory), "r+b") as file:
        _reserve(file.fileno(), nbytes)
        file.write(memoryview((ctypes.c_char * nbytes).from_address(host.data_ptr())))
        file.flush()
        mapping = mmap.mmap(file.fileno(), nbytes)
    return torch.frombuffer(mapping, dtype=host.dtype).view(host.shape)


def _open_unnamed(directory: str) -> int:
    """Descriptor of a new file, mode 0600, that has no name any more."""
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed:
        try:
            return os.open(directory, unnamed | os.O_RDWR | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    descriptor, path = tempfile.mkstemp(prefix=".hf_memeff-", dir=directory)
    os.unlink(path)
    if os.fstat(descriptor).st_mode & 0o077:
        os.close(descriptor)
        raise _unusable(
            directory, "a file system that ignores file modes", "one where others cannot read a file of mode 0600"
        )
    return descriptor


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate the file's blocks, where the system can (macOS cannot); otherwise the write that follows does."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _contiguous_on_host(hidden: Tensor) -> Tensor:
    if hidden.device.type != "cuda":
        return hidden.to("cpu").contiguous()
    host = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu", pin_memory=True)
    host.copy_(hidden, non_blocking=True)
    torch.cuda.current_stream(hidden.device).synchronize()
    return host


def _require_plain(hidden: Tensor) -> None:
    if type(hidden) not in (Tensor, nn.Parameter) or hidden.layout != torch.strided:
        raise TypeError(
            f"activation store got a {type(hidden).__name__} ({hidden.layout}), expected a plain dense tensor. "
            'Fix: set activation_store="memory".'
        )


@functools.cache
def _copy_stream(device_index: int) -> torch.cuda.Stream:
    """The one side stream of a GPU in this process: copies in and out of a host buffer keep their order on it."""
    return torch.cuda.Stream(device_index)


def _saved_tensor_hooks_active() -> bool:
    """Whether `save_for_backward` would call a pack hook now.

    PyTorch has no public query (2.13). Without the private one the answer is yes, which costs time and stays right.
    """
    query = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return query is None or query(True) is not None


def _file_system(path: str) -> str | None:
    """Type of the file system that holds `path`, which need not exist yet: "ext4", ...; None without /proc."""
    resolved = os.path.realpath(path)
    found, longest = None, 0
    for line in _mount_table():
        mount, _, source = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two mounts on the same point, the later one is seen
            found, longest = source.split()[0], len(point)
    return found


def _mount_table() -> list[str]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []
