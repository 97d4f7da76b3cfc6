"""Fixtures that look into the engine while a trainer runs."""

from __future__ import annotations

import pytest
import torch

from hf_memeff.blocks import block, causal_loss


@pytest.fixture
def tiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the hidden states whose loss was computed in tiles so far, as a list that grows."""
    calls: list[torch.Size] = []
    original = causal_loss.linear_cross_entropy

    def note(hidden, *args, **kwargs):
        calls.append(hidden.shape)
        return original(hidden, *args, **kwargs)

    monkeypatch.setattr(causal_loss, "linear_cross_entropy", note)
    return calls


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that come once per process come once more."""
    monkeypatch.setattr(block, "_said", set())
