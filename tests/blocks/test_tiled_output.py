"""Outputs of a tiled step: the model's own, except that reading the logits is an error."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32, convert_to_fp32
from torch.utils._pytree import tree_leaves

from blocks._causal_loss import BATCH
from blocks._models import LENGTH, adapted, engine
from hf_memeff.blocks.tiled_output import LogitsNotComputedError

READS = {
    "attribute": lambda out: out.logits,
    "key": lambda out: out["logits"],
    "getattr": lambda out: getattr(out, "logits", None),
}


@pytest.mark.parametrize("read", READS)
def test_reading_the_logits_names_the_way_out(read):
    model = adapted("llama", torch.float32)
    with engine(model):
        out = model(**BATCH)
        with pytest.raises(LogitsNotComputedError, match=r'got a read of outputs.logits.*Set tiled_loss="never"'):
            READS[read](out)
    with engine(model, tiled_loss="never"):
        assert READS[read](model(**BATCH)).shape == (2, LENGTH, 128)


def test_the_rest_of_the_output_is_the_model_s_own():
    model = adapted("llama", torch.float32)
    with engine(model):
        out = model(**BATCH, output_hidden_states=True)
        own = type(out).__mro__[1]
        assert own.__name__ == "CausalLMOutputWithPast" and isinstance(out, own)
        assert type(out).__name__ == own.__name__
        assert list(out.keys()) == ["loss", "hidden_states"] and "logits" not in out
        assert out[0] is out.loss and out["loss"] is out.loss and len(out.to_tuple()) == 2
        assert len(out.hidden_states) == 3 and out.attentions is None


def test_accelerate_s_conversion_of_outputs():
    """It runs over every output under mixed precision."""
    model = adapted("llama", torch.bfloat16, adapter_dtype=torch.float32)
    with engine(model):
        out = convert_to_fp32(model(**BATCH, output_hidden_states=True))
        assert out.loss.dtype == torch.float32 and out.hidden_states[0].dtype == torch.float32
        with pytest.raises(LogitsNotComputedError):
            _ = out.logits
        model.forward = convert_outputs_to_fp32(model.forward)
        model(**BATCH).loss.backward()
        del model.forward
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def test_outputs_are_walked_and_pickled_without_the_logits():
    """DDP and FSDP walk an output for tensors; multiprocessing pickles it."""
    model = adapted("llama", torch.float32)
    with engine(model):
        out = model(**BATCH)
        assert [leaf.shape for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)] == [torch.Size([])]
        assert "logits" not in {f.name for f in dataclasses.fields(out)}
        assert type(out.loss.detach()) is torch.Tensor
    assert "logits" in {f.name for f in dataclasses.fields(type(out).__mro__[1])}  # the model's own class keeps it
    assert pickle.loads(pickle.dumps(out.loss.detach())) == out.loss
