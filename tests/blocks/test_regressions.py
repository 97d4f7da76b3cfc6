"""Calls that once went wrong: hooks on the head, odd arguments, defaults left out."""

import pytest
import torch

from blocks._models import LENGTH, adapted, engine, errors, step
from blocks._tolerances import ORDER_OF_SUMS
from blocks.test_causal_loss import BATCH, compare, loss_path
from blocks.test_layouts import assert_call_is_lora_s, decoder_layers


def test_a_hook_on_the_head_sees_whole_logits():
    """A probe that only looks changes no loss, so that nothing but its eyes would notice a stand-in."""
    model = adapted("llama", torch.float32)
    seen = []
    model.get_base_model().lm_head.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    expected = step(model, BATCH)
    with engine(model):
        got = step(model, BATCH)
        assert loss_path(model)[0] == "logits" and "hook" in loss_path(model)[1]
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float32]
    assert set(seen) == {(2, LENGTH, 128)}


@pytest.mark.parametrize("keep", [torch.tensor([3, 7, 9])])
def test_logits_to_keep(keep):
    model = adapted("llama", torch.float32)
    batch = BATCH | {"logits_to_keep": keep, "labels": BATCH["labels"][:, :3]}
    expected = step(model, batch)
    with engine(model):
        got = step(model, batch)
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float32]


def test_outputs_can_be_printed():
    model = adapted("llama", torch.float32)
    with engine(model):
        assert "loss" in repr(model(**BATCH))


def test_a_count_of_one_element():
    batch = BATCH | {"num_items_in_batch": torch.tensor([77])}
    assert compare(adapted("llama", torch.float64), batch) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3"])
def test_defaults_of_the_layer_s_own_forward(family):
    """A layer called without a mask fills in its default; some attentions have none of their own."""
    model = adapted(family)
    layer = decoder_layers(model)[0]
    assert_call_is_lora_s(model, lambda h, mask, ids, rotary: layer(h, position_embeddings=rotary))
