"""Dtypes that sums and layers compute in."""

from __future__ import annotations

import pytest
import torch

from hf_memeff.ops.precision import accumulation_dtype, autocast_dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_float32_at_least(dtype):
    assert accumulation_dtype(dtype) == torch.float32


def test_sums_of_float64_are_float64():
    assert accumulation_dtype(torch.float64) == torch.float64


def test_autocast_is_asked_per_device_type():
    assert autocast_dtype("cpu") is None
    with torch.autocast("cpu", torch.float16):
        assert autocast_dtype("cpu") == torch.float16
        assert autocast_dtype("cuda") is None
        assert autocast_dtype("meta") is None  # a device type that autocast does not know
        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype("cpu") is None
