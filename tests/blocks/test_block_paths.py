"""Whatever cannot run structured is still LoRA's result, and the status says which path ran and why."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, VeloraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from blocks._models import LENGTH, adapted, engine, errors, packed_batch, paths, step, worst_error
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from helpers import VOCAB, token_batch
from hf_memeff.blocks.attach import attach_blocks, engine_status
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.blocks.structured import StructuredBlock

TOLERANCE = ORDER_OF_SUMS[torch.float64]


def reports(model):
    """Path and reason of each block."""
    return [(b.path, b.reason) for b in engine_status(model.get_base_model()).blocks]


def assert_lora_s(model, path, reason, batch=None):
    """Gradients are LoRA's, every block takes ``path``, and its reason contains ``reason``."""
    batch = token_batch(2, LENGTH, "right") if batch is None else batch
    expected = step(model, batch)
    with engine(model):
        found = reports(model)
        got = step(model, batch)
        after = reports(model)
    assert max(errors(got, expected).values()) <= TOLERANCE
    assert torch.equal(got.random, expected.random)
    assert found and all(p == path and reason in r for p, r in found), found
    assert after == found


COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
PLAIN = {**COMMON, "intermediate_size": 96}
MOE = {**PLAIN, "num_key_value_heads": 2, "head_dim": 16, "experts_implementation": "eager"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNKNOWN = {
    "opt": (transformers.OPTConfig(**COMMON, ffn_dim=96, word_embed_proj_dim=64), ["q_proj", "v_proj", "fc1"]),
    "gpt_neox": (transformers.GPTNeoXConfig(**PLAIN), ["query_key_value", "dense_h_to_4h"]),
    "bloom": (transformers.BloomConfig(**COMMON, n_layer=2, n_head=4), ["query_key_value"]),
    "phi": (transformers.PhiConfig(**PLAIN), ["q_proj", "fc2"]),
    "cohere": (transformers.CohereConfig(**PLAIN, eos_token_id=2), ["q_proj", "up_proj"]),
    "qwen3_moe": (transformers.Qwen3MoeConfig(**MOE, **EXPERTS), ["q_proj", "o_proj"]),
    "mixtral": (transformers.MixtralConfig(**MOE, num_local_experts=4), ["q_proj", "v_proj"]),
}


def unknown_model(family):
    """A model without a named layout, adapted."""
    config, targets = UNKNOWN[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return adapted(model=model, target_modules=targets, lora_dropout=0.2)


@pytest.mark.parametrize("family", UNKNOWN)
def test_an_unknown_architecture_runs_as_whole_block_recompute(family):
    model = unknown_model(family)
    assert_lora_s(model, "recompute", "the layout of ")
    with pytest.raises(RuntimeError, match=r"cannot run structured .*the layout of .* is not known"):
        attach_blocks(model.get_base_model(), EngineOptions(strict=True))


def test_an_encoder_decoder():
    """Relative position biases travel from the first block to the others, cross-attention reads the encoder."""
    small = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **small)
    torch.manual_seed(0)
    base = transformers.T5ForConditionalGeneration(config).double()
    model = adapted(model=base, target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM", lora_dropout=0.2)
    batch = token_batch(2, 9)
    batch["labels"] = token_batch(2, 5)["labels"]
    assert_lora_s(model, "recompute", "the layout of T5Block", batch)


def test_an_encoder():
    config = transformers.BertConfig(**PLAIN, num_labels=3)
    torch.manual_seed(0)
    base = transformers.BertForSequenceClassification(config).double()
    model = adapted(
        model=base, target_modules=["query", "value", "output.dense"], task_type="SEQ_CLS", lora_dropout=0.2
    )
    batch = token_batch(2, 9, "right") | {"labels": torch.tensor([0, 2])}
    assert_lora_s(model, "recompute", "the layout of BertLayer", batch)


def test_a_model_without_blocks_is_left_alone():
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), LoraConfig(target_modules=["0"]))
    with engine(model) as base:
        status = engine_status(base)
        assert status.blocks == () and [linear.path for linear in status.linears] == ["peft"]
        assert "no decoder block was found" in status.notes[0]
        model(torch.ones(3, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="no decoder block was found in it"):
        attach_blocks(base, EngineOptions(strict=True))


VARIANTS = {
    "dora": ({"use_dora": True}, "recompute", "Dora runs through PEFT's own forward"),
    "lora_bias": ({"lora_bias": True}, "recompute", "lora_bias runs through PEFT's own forward"),
    "velora": (
        {"velora_config": VeloraConfig(num_groups=4)},
        "recompute",
        "runs through PEFT's own forward",
    ),
    "alora": ({"alora_invocation_tokens": [5, 6]}, "off", "aLoRA gets its offsets through hooks"),
    "rslora": ({"use_rslora": True}, "structured", ""),
    "pissa": ({"init_lora_weights": "pissa"}, "structured", ""),
    "olora": ({"init_lora_weights": "olora"}, "structured", ""),
    "gaussian": ({"init_lora_weights": "gaussian"}, "structured", ""),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_s_variants_of_lora(variant):
    settings, path, reason = VARIANTS[variant]
    # PiSSA's decomposition knows no float64, so the base is float32 until the adapter is in
    model = adapted("qwen2", torch.float32, target_modules=["q_proj", "v_proj", "down_proj"], **settings).double()
    batch = token_batch(2, LENGTH)
    if variant == "alora":
        batch["input_ids"][:, 7:9] = torch.tensor([5, 6])
    assert_lora_s(model, path, reason, batch)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dora_with_dropout(dropout):
    model = adapted("llama", use_dora=True, lora_dropout=dropout)
    assert_lora_s(model, "recompute", "Dora runs through PEFT's own forward")


def test_one_dora_layer_among_plain_ones():
    """A variant in one block leaves the others structured."""
    model = adapted("llama", target_modules=["q_proj", "up_proj"], layers_to_transform=[0])
    model.add_adapter("b", LoraConfig(use_dora=True, target_modules=["v_proj"], layers_to_transform=[1]))
    model.base_model.set_adapter(["default", "b"])
    model.double()
    expected = step(model, token_batch(2, LENGTH))
    with engine(model):
        assert [p for p, _ in reports(model)] == ["structured", "recompute"]
        got = step(model, token_batch(2, LENGTH))
    assert max(relative_error(got.gradients[n], g) for n, g in expected.gradients.items()) <= TOLERANCE


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm", "q_norm"])
def test_trained_norms(norm):
    model = adapted("qwen3")
    for name, parameter in model.named_parameters():
        if norm in name:
            parameter.requires_grad_(True)
    expected = step(model, token_batch(2, LENGTH))
    assert sum(norm in n for n in expected.gradients) == 2
    assert_lora_s(model, "recompute", f"{norm}.weight is trained")


@pytest.mark.parametrize(("bias", "trained"), [("lora_only", True), ("all", True), ("none", False)])
def test_trained_biases(bias, trained):
    model = adapted("qwen2", bias=bias)
    expected = step(model, token_batch(2, LENGTH))
    assert any("bias" in n for n in expected.gradients) == trained
    if trained:
        assert_lora_s(model, "recompute", "its base weights are trained")
    else:
        assert_lora_s(model, "structured", "")


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "input_layernorm", "model.norm"])
def test_c25_modules_to_save(saved):
    model = adapted("llama", target_modules=["q_proj", "down_proj"], modules_to_save=[saved])
    expected = step(model, token_batch(2, LENGTH))
    assert any(f"{saved}.modules_to_save" in n for n in expected.gradients)
    if saved == "input_layernorm":
        assert_lora_s(model, "recompute", "input_layernorm")
    else:
        assert_lora_s(model, "structured", "")


def test_full_fine_tuning_of_one_projection_beside_lora():
    model = adapted("llama", target_modules=["q_proj", "v_proj"])
    for layer in model.get_base_model().model.layers:
        layer.mlp.down_proj.weight.requires_grad_(True)
    assert_lora_s(model, "recompute", "its base weights are trained")


def embedded_step(model, batch):
    """Loss and the gradient of the embeddings: what there is to compare where no adapter takes part."""
    leaf = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=leaf, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("state", ["merged", "disabled", "unmerged"])
def test_merged_and_disabled_adapters(state):
    model = adapted("llama")
    batch = token_batch(2, LENGTH, "left")
    if state == "unmerged":
        model.merge_adapter()
        model.unmerge_adapter()
        assert worst_error(model, batch) <= TOLERANCE
        return
    # merged and disabled while attached, as a trainer's reference pass and a weight sync do
    with engine(model) as base:
        if state == "merged":
            model.merge_adapter()
            got = embedded_step(model, batch)
            found = [b.path for b in engine_status(base).blocks]
            model.unmerge_adapter()
        else:
            with model.disable_adapter():
                got = embedded_step(model, batch)
                found = [b.path for b in engine_status(base).blocks]
        assert [b.path for b in engine_status(base).blocks] == ["structured"] * 2
    assert found == ["off"] * 2
    if state == "merged":
        model.merge_adapter()
        expected = embedded_step(model, batch)
    else:
        with model.disable_adapter():
            expected = embedded_step(model, batch)
    for ours, theirs in zip(got, expected, strict=True):
        assert relative_error(ours, theirs) <= TOLERANCE


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
