"""Calls that blocks must not run structured, or not at all, are still LoRA's: evaluation, caches, outputs, hooks."""

from __future__ import annotations

import copy

import pytest
import torch

from blocks._block_paths import TOLERANCE, assert_lora_s
from blocks._models import LENGTH, adapted, engine, errors, packed_batch, paths, step, worst_error
from blocks._tolerances import relative_error
from blocks._unknown import UNKNOWN, unknown_model
from helpers import token_batch
from hf_memeff.blocks.structured import StructuredBlock


@pytest.fixture
def structured_calls(monkeypatch):
    """Counts structured forward passes."""
    calls = []
    real = StructuredBlock.forward

    def counted(ctx, hidden, *args):
        calls.append(hidden.shape)
        return real(ctx, hidden, *args)

    monkeypatch.setattr(StructuredBlock, "forward", staticmethod(counted))
    return calls


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference", "training"])
def test_without_training_the_dense_original_runs(mode, structured_calls):
    """Also without gradients in training mode, where dropout is on: the same bits as LoRA."""
    model = adapted("gemma2", torch.float32, lora_dropout=0.2)
    batch = token_batch(2, LENGTH, "left")
    model.train(mode != "eval")
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    outputs = []
    for attached in (False, True):
        torch.manual_seed(3)
        with contexts.get(mode, torch.enable_grad)():
            if attached:
                with engine(model, tiled_loss="never"):
                    structured_calls.clear()
                    outputs.append(model(**batch).logits)
            else:
                outputs.append(model(**batch).logits)
    assert torch.equal(*outputs) or mode == "training"
    assert len(structured_calls) == (2 if mode == "training" else 0)


def test_evaluation_with_gradients_is_lora_s(structured_calls):
    """``model.eval()`` and a backward pass, as adversarial or attribution code does."""
    model = adapted("llama", lora_dropout=0.3).eval()
    batch = token_batch(2, LENGTH)
    expected = step(model, batch)
    with engine(model):
        structured_calls.clear()
        got = step(model, batch)
    assert max(errors(got, expected).values()) == 0.0 and not structured_calls


def test_attention_weights_in_training():
    model = adapted("llama", overrides={"attn_implementation": "eager"})
    batch = token_batch(2, LENGTH) | {"output_attentions": True, "output_hidden_states": True}

    def run():
        out = model(**batch)
        loss = out.loss + sum(a.square().sum() for a in out.attentions) + out.hidden_states[1].square().sum()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return out, gradients

    out, expected = run()
    with engine(model):
        ours, got = run()
    for a, b in zip((*ours.attentions, *ours.hidden_states), (*out.attentions, *out.hidden_states), strict=True):
        assert relative_error(a, b) <= TOLERANCE
    assert set(got) == set(expected)
    assert max(relative_error(got[n], g) for n, g in expected.items()) <= TOLERANCE


def test_hidden_states_in_training_stay_structured(structured_calls):
    model = adapted("llama")
    batch = token_batch(2, LENGTH) | {"output_hidden_states": True}

    def run():
        out = model(**batch)
        assert len(out.hidden_states) == 3
        (out.loss + sum(h.square().mean() for h in out.hidden_states)).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return out.hidden_states, gradients

    states, expected = run()
    with engine(model, strict=True):
        structured_calls.clear()
        ours, got = run()
    assert len(structured_calls) == 2
    for a, b in zip(ours, states, strict=True):
        assert relative_error(a, b) <= TOLERANCE
    assert max(relative_error(got[n], g) for n, g in expected.items()) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_filled_cache_in_training(family):
    """A prefix computed before, such as a cached prompt: the block must neither lose it nor append to it twice."""
    model = unknown_model(family) if family in UNKNOWN else adapted(family)
    batch = token_batch(2, LENGTH)
    with torch.no_grad():
        prefix = model(input_ids=batch["input_ids"][:, :6], use_cache=True).past_key_values
    assert prefix.get_seq_length() == 6
    rest = {"input_ids": batch["input_ids"][:, 6:], "labels": batch["labels"][:, 6:]}
    expected = step(model, rest | {"past_key_values": copy.deepcopy(prefix)})
    without = step(model, rest)
    assert relative_error(without.loss, expected.loss) > 1e-6
    with engine(model):
        cache = copy.deepcopy(prefix)
        got = step(model, rest | {"past_key_values": cache})
    assert max(errors(got, expected).values()) <= TOLERANCE
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "bloom"])
def test_a_plain_training_call_with_the_default_cache(family):
    model = unknown_model(family) if family in UNKNOWN else adapted(family)
    batch = token_batch(2, LENGTH)
    assert model(**batch).past_key_values is not None  # stock LoRA builds one
    expected = step(model, batch)
    for given in ({}, {"use_cache": True}):
        with engine(model):
            assert model(**batch, **given).past_key_values is None
            got = step(model, batch | given)
            with torch.no_grad():
                assert model(**batch).past_key_values is not None
        assert max(errors(got, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("how", ["default", "use_cache=False", "checkpointing"])
def test_packed_samples_are_told_apart_where_lora_does(how):
    """transformers separates samples by restarting positions only where it builds no cache object."""
    model = adapted("llama")
    batch = packed_batch() | ({"use_cache": False} if how == "use_cache=False" else {})
    if how == "checkpointing":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    assert worst_error(model, batch) <= TOLERANCE


def test_a_filled_cache_in_a_layer_with_an_open_signature():
    model = adapted("llama")
    for layer in model.get_base_model().model.layers:
        parent = type(layer)

        def forward(self, *args, parent=parent, **kwargs):
            return parent.forward(self, *args, **kwargs)

        layer.__class__ = type(parent.__name__, (parent,), {"forward": forward})
    batch = token_batch(2, LENGTH)
    with torch.no_grad():
        prefix = model(input_ids=batch["input_ids"][:, :6], use_cache=True).past_key_values
    rest = {"input_ids": batch["input_ids"][:, 6:], "labels": batch["labels"][:, 6:]}
    expected = step(model, rest | {"past_key_values": copy.deepcopy(prefix)})
    with engine(model):
        got = step(model, rest | {"past_key_values": copy.deepcopy(prefix)})
    assert max(errors(got, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn", "input_layernorm", "mlp.up_proj.lora_A.default"])
def test_hooks_of_users_are_called_and_seen(place):
    """A probe on an activation, or a hook that changes it: the block runs whole, with the hook in it."""
    model = adapted("llama")
    seen = []

    def double(module, args, output):
        seen.append(module)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    for layer in model.get_base_model().model.layers:
        layer.get_submodule(place).register_forward_hook(double)
    assert_lora_s(model, "recompute", "hooks")
    assert len(seen) >= 4


def test_a_hook_registered_after_attaching_is_seen():
    model = adapted("llama")
    batch = token_batch(2, LENGTH)
    with engine(model):
        handle = model.get_base_model().model.layers[0].self_attn.v_proj.register_forward_hook(lambda m, a, y: 2 * y)
        assert paths(model) == ["recompute", "structured"]
        got = step(model, batch)
    expected = step(model, batch)
    handle.remove()
    assert max(errors(got, expected).values()) <= TOLERANCE
    with engine(model, strict=True):
        model.get_base_model().model.layers[1].self_attn.v_proj.register_forward_hook(lambda m, a, y: 2 * y)
        with pytest.raises(RuntimeError, match=r"v_proj: it has forward hooks.*strict=True"):
            step(model, batch)


def test_hooks_on_the_layer_itself_see_input_and_output_once():
    model = adapted("llama")
    seen = []
    for layer in model.get_base_model().model.layers:
        layer.register_forward_pre_hook(lambda m, args: seen.append(("in", args[0].shape)))
        layer.register_forward_hook(lambda m, args, y: seen.append(("out", y.shape)))
    with engine(model, strict=True):
        step(model, token_batch(2, LENGTH))
    assert seen == [("in", (2, LENGTH, 64)), ("out", (2, LENGTH, 64))] * 2
