"""The folder in the user's cache that the disk store and the recipes share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hf_memeff.blocks.store import ActivationStoreError, default_directory, user_cache_folder


@pytest.mark.parametrize(("value", "expected"), [("relative", None), ("/somewhere", "/somewhere/hf_memeff")])
def test_a_relative_cache_variable_is_ignored(
    value: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache_folder() == Path(expected or Path.home() / ".cache" / "hf_memeff")


def test_windows_has_its_own_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert user_cache_folder() == Path("/local/hf_memeff")


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_user_without_a_home_directory(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a bare number: "~" stays as it is, and must not become a folder's name."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert user_cache_folder() is None
    with pytest.raises(ActivationStoreError, match=r"got no home directory for this user, expected a cache folder"):
        default_directory()
