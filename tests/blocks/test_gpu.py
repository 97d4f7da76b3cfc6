"""What can only be seen on a GPU, through whole steps: autocast, dropout with the CUDA generator, the stores."""

from __future__ import annotations

import pytest
import torch

from blocks._models import adapted, engine, errors, step
from hf_memeff.memory import measure_peak_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def on_gpu(dtype: torch.dtype = torch.float32, **settings):
    model = adapted("llama", dtype=dtype, **settings).cuda()
    tokens = torch.randint(3, 120, (2, 33), generator=torch.Generator().manual_seed(5)).cuda()
    return model, {"input_ids": tokens, "labels": tokens}


def test_gradients_are_lora_s_in_float32():
    model, batch = on_gpu()
    expected = step(model, batch)
    with engine(model):
        got = step(model, batch)
    assert max(errors(got, expected).values()) <= 1e-4  # TF32 may be on


def test_gradients_under_bfloat16_autocast_are_as_close_to_float32_as_lora_s():
    model, batch = on_gpu()
    exact = step(model, batch)
    with torch.autocast("cuda", torch.bfloat16):
        stock = errors(step(model, batch), exact)
        with engine(model):
            ours = errors(step(model, batch), exact)
    assert max(ours.values()) <= 2 * max(stock.values())


def test_dropout_is_replayed_from_the_cuda_generator():
    model, batch = on_gpu(lora_dropout=0.3)
    expected = step(model, batch, seed=3)
    with engine(model):
        got = step(model, batch, seed=3)
        other = step(model, batch, seed=4)
    assert max(errors(got, expected).values()) <= 1e-4
    assert max(errors(other, expected).values()) > 1e-2


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_a_store_off_the_gpu_changes_nothing_but_the_peak(store, tmp_path):
    model, batch = on_gpu()
    directory = str(tmp_path) if store == "disk" else None
    with engine(model):
        expected = step(model, batch)
        kept = measure_peak_memory(lambda: step(model, batch), device="cuda")
    with engine(model, activation_store=store, activation_store_dir=directory):
        got = step(model, batch)
        moved = measure_peak_memory(lambda: step(model, batch), device="cuda")
    assert all(error == 0.0 for error in errors(got, expected).values())
    assert moved.peak_bytes < kept.peak_bytes
