"""Run something without moving the random numbers of the run around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore, on leaving, the random states of Python, NumPy and PyTorch, on the CPU and on the device's kind.

    Args:
        device: where the model runs; all devices of its kind are restored where PyTorch can tell their states.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), _device_state(device)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        _set_device_state(device, states[3])


def _device_state(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else module.get_rng_state()


def _set_device_state(device: torch.device, state: Any) -> None:
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(state)
    else:
        module.set_rng_state(state)
