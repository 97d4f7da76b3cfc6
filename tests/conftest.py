"""What holds for every test: one thread, no Hub, a seed, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

# Threads that wait for each other cost more than they bring on tiny tensors, the more so on a busy machine.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu without CUDA."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs CUDA")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start each test from the same random state."""
    torch.manual_seed(0)
