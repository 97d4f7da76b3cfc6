"""Masks that are drawn again: the numbers of ``nn.Dropout``, and generators that are put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_memeff.ops.dropout import draw_mask, replayed_rng, save_rng

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probability", [0.1, 0.3, 0.999, 1.0])
def test_c08_a_mask_is_what_the_module_would_have_done(probability, dtype):
    dropout = nn.Dropout(probability)
    x = torch.randn(11, 13).to(dtype)
    torch.manual_seed(4)
    expected, after = dropout(x), torch.get_rng_state()
    torch.manual_seed(4)
    mask = draw_mask(dropout, 11, 13, dtype, CPU)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(mask.apply(x), expected)
    assert mask.keep.dtype == torch.bool  # one byte for each element
    assert torch.equal(mask.apply(x[2:5], slice(2, 5)), expected[2:5])


@pytest.mark.parametrize("dropout", [None, nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5).eval()])
def test_c08_what_passes_its_input_through_draws_nothing(dropout):
    before = torch.get_rng_state()
    assert draw_mask(dropout, 3, 4, torch.float32, CPU) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_applying_a_mask_leaves_the_input_alone():
    x = torch.ones(3, 4)
    draw_mask(nn.Dropout(0.5), 3, 4, torch.float32, CPU).apply(x)
    assert torch.equal(x, torch.ones(3, 4))


def test_no_rows():
    assert draw_mask(nn.Dropout(0.5), 0, 4, torch.float32, CPU).keep.shape == (0, 4)


def test_a_replay_gives_the_same_numbers_and_puts_the_generator_back():
    states = save_rng(CPU)
    first = torch.rand(3)
    now = torch.get_rng_state()
    with replayed_rng(states, CPU):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), now)


def test_a_replay_puts_the_generator_back_after_an_error():
    now = torch.get_rng_state()
    with pytest.raises(KeyError), replayed_rng(save_rng(CPU), CPU):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), now)
