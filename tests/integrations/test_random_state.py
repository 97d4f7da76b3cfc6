"""What runs inside leaves the random numbers of the run alone."""

import random

import numpy as np
import pytest
import torch

from hf_memeff.integrations.random_state import kept_random_state


def draw(device):
    return random.random(), np.random.rand(), torch.rand(2).tolist(), torch.rand(2, device=device).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fails", [False, True])
def test_numbers_after_it_are_those_that_would_have_come(device, fails):
    device = torch.device(device)
    with kept_random_state(device):
        expected = draw(device)
    try:
        with kept_random_state(device):
            assert draw(device) == expected
            torch.manual_seed(123)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert draw(device) == expected and torch.initial_seed() != 123
