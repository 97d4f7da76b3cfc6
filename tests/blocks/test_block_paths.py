"""Whatever cannot run structured is still LoRA's result: architectures, and what PEFT can put on a block."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, VeloraConfig, get_peft_model
from torch import nn

from blocks._block_paths import TOLERANCE, assert_lora_s, reports
from blocks._models import LENGTH, adapted, engine, step, worst_error
from blocks._tolerances import relative_error
from blocks._unknown import PLAIN, UNKNOWN, unknown_model
from helpers import VOCAB, token_batch
from hf_memeff.blocks.attach import attach_blocks, engine_status
from hf_memeff.blocks.options import EngineOptions


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
