"""The early look at a model's end: what it reads, what it leaves alone, and what is said where it cannot look."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForSequenceClassification

from blocks._models import LENGTH, adapted, engine, step
from helpers import VOCAB, tiny_model, token_batch
from hf_memeff.blocks.attach_salient import set_token_budget
from hf_memeff.blocks.batch_tokens import BatchTokens, read_tokens
from hf_memeff.blocks.options import SalientTokens
from hf_memeff.blocks.readout import _MEAN_ROWS, Readout, _final_norm, _mean_row, attach_readout, readout_of
from hf_memeff.blocks.salient import SalientCall
from ops.test_saliency import early_look


def sparse(budget=0.3, **settings):
    return SalientTokens(token_budget=budget, **{"dense_layers": (), "saliency": "loss", **settings})


@pytest.fixture
def looks(monkeypatch):
    """The arguments of every early look."""
    seen = []
    own = Readout.scores
    monkeypatch.setattr(Readout, "scores", lambda self, *args: (seen.append((self, *args)), own(self, *args))[1])
    return seen


def test_the_mean_of_a_vocabulary_is_taken_without_a_wide_copy_of_it():
    """A bfloat16 head of 128,000 rows would cost a CPU twice its size for a moment, more than a step's activations."""
    weight = torch.randn(6 * _MEAN_ROWS + 5, 64, dtype=torch.bfloat16)
    _mean_row(weight[:8])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        got = _mean_row(weight)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < weight.numel()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, weight.double().mean(0).float())


def test_hooks_on_the_final_norm_are_told_of_the_model_s_own_use_alone(looks):
    model, calls = adapted("llama", torch.float32), []
    model.get_base_model().model.norm.register_forward_hook(lambda module, args, y: calls.append(y.shape))
    with engine(model, strict=True, salient=sparse()):
        step(model, token_batch(2, LENGTH))
    assert calls == [(2, LENGTH, 64)] and len(looks) == 2


def test_the_labelled_rows_are_looked_for_once_per_call(looks):
    model = adapted("llama", torch.float32)
    with engine(model, strict=True, salient=sparse()):
        step(model, token_batch(2, LENGTH))
        first, second = (places for *_, places in looks)
        assert first is second
        step(model, token_batch(2, LENGTH))
    assert looks[-1][-1] is not first


def test_a_final_norm_that_is_trained_is_found_and_read_as_trained(looks):
    model, batch = adapted("llama", torch.float32, modules_to_save=["model.norm"]), token_batch(2, LENGTH)
    with engine(model, strict=True, salient=sparse()) as base:
        step(model, batch)
        readout, *arguments = looks[0]
        before = readout.scores(*arguments)
        with torch.no_grad():
            base.model.norm.modules_to_save["default"].weight.copy_(torch.randn(64))
        assert not torch.equal(readout.scores(*arguments), before)


HEADS = {
    "tied": ({"tie_word_embeddings": True}, {}),
    "bfloat16": ({}, {}),
    "adapted": ({}, {"target_modules": ["q_proj", "v_proj", "lm_head"]}),
    "trained": ({}, {"modules_to_save": ["lm_head"]}),
    "resized": ({"vocab_size": VOCAB + 12}, {}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_output_layers_of_every_kind_are_read(kind, looks):
    """Tied, in half precision, with an adapter (which does not enter), trained and saved, or of another size."""
    overrides, lora = HEADS[kind]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model, batch = adapted("llama", dtype, overrides=overrides, **lora), token_batch(2, LENGTH, "left")
    base = model.get_base_model()
    weight = base.lm_head.weight
    if kind == "trained":
        weight = base.lm_head.modules_to_save["default"].weight
        torch.nn.init.normal_(weight)
    with engine(model, strict=True, salient=sparse()):
        assert step(model, batch).loss.isfinite()
    assert len(looks) == 2
    tolerance = 3e-2 if kind == "bfloat16" else 1e-5
    readout, hidden, targets, places = looks[0]
    got = readout.scores(hidden, targets, places)
    for row in range(2):
        rows = (targets[row] != -100).nonzero().flatten()
        with torch.no_grad():
            expected = early_look(rows, hidden[row], targets[row], base.model.norm, weight, 0.0)
        torch.testing.assert_close(got[row, rows], expected.float(), rtol=1e-3, atol=tolerance)


def test_the_language_model_s_norm_is_taken_not_its_vision_tower_s():
    class Decoder(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.layers, self.first_norm, self.norm = nn.ModuleList(), nn.RMSNorm(4), norm

    model = nn.ModuleDict({"vision": Decoder(nn.LayerNorm(4)), "text": Decoder(nn.RMSNorm(4))})
    assert _final_norm(model, model.values(), 4) == "text.norm"
    assert _final_norm(model, model.values(), 5) is None


def test_weights_that_are_not_here_are_not_read_and_it_is_said():
    """As between the gathers of a sharded model, or with an offloaded head."""
    ids = torch.arange(6)[None]
    tokens = read_tokens(nn.Identity(), (), {"input_ids": ids, "labels": ids})
    norm, away, head = nn.RMSNorm(4), nn.Linear(4, 9, bias=False, device="meta"), nn.Linear(4, 9)
    tokens.readout = Readout(norm, away)
    assert tokens.likely_loss(torch.randn(1, 6, 4)) is None
    (notice,) = SalientCall(sparse(), tokens).notices(6, 4)
    assert 'saliency="loss"' in notice and "attention alone" in notice and "not here as a whole" in notice
    tokens.readout = Readout(norm, head)
    assert tokens.likely_loss(torch.randn(1, 6, 4)) is not None and SalientCall(sparse(), tokens).notices(6, 4) == []
    (notice,) = SalientCall(sparse(), tokens).notices(6, 5)
    assert "takes 4 features, not 5" in notice
    (notice,) = SalientCall(sparse(), BatchTokens()).notices(6, 4)
    assert "sees no labels" in notice and 'saliency="gradient"' in notice


def test_what_is_remembered_of_a_call_does_not_keep_the_output_layer(looks):
    model = adapted("llama", torch.float32)
    with engine(model, strict=True, salient=sparse()):
        step(model, token_batch(2, LENGTH))
    head, remembered = weakref.ref(model.get_base_model().lm_head), looks[-1][0]
    looks.clear()
    del model
    gc.collect()
    assert head() is None and remembered.unreadable(64) == "the model is gone"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_quantised_output_layer_is_refused(dtype):
    model = tiny_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=r"cannot be read early .*plain matrix.*Fix: pass saliency=\"attention\""):
        attach_readout(model, [model.model], "loss")
    assert readout_of(model) is None


def test_a_model_that_cannot_be_read_is_refused_where_tokens_are_left_out():
    config = tiny_model().config
    config.num_labels = 3
    base = LlamaForSequenceClassification(config)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")).train()
    batch = {"input_ids": torch.randint(3, VOCAB, (2, 9)), "labels": torch.tensor([0, 2])}
    expected = step(model, batch)
    with engine(model, strict=True, salient=sparse(1.0)):  # keeps every token, so that nothing is scored
        got = step(model, batch)
        torch.testing.assert_close(got.loss, expected.loss)
        with pytest.raises(ValueError, match=r"LlamaForSequenceClassification that cannot be read early"):
            set_token_budget(base, 0.5)
        again = step(model, batch)  # the refused budget is not half in force
        assert all(torch.equal(again.gradients[n], g) for n, g in got.gradients.items())
    with pytest.raises(ValueError, match="cannot be read early"), engine(model, salient=sparse(0.5)):
        pass
