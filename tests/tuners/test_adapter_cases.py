"""Published cases of single layers, whole adapters and what PEFT puts beside them: C03, C08, C21 to C23, C25 to C27."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from helpers import (
    adapted_model,
    fill_adapters,
    logits_of,
    loss_and_gradients,
    tiny_model,
    token_batch,
    worst_relative_error,
)
from hf_memeff import memeff_status

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
BOTH_FACTORS = ("lora_A", "lora_B")


def assert_lora_s(model, stock, batch=None, tolerance=1e-5):
    """Assert that two models with equal adapters have equal losses and gradients."""
    batch = token_batch(padding="right") if batch is None else batch
    (loss, gradients), (expected_loss, expected) = (loss_and_gradients(m, batch) for m in (model, stock))
    assert abs(loss - expected_loss) <= tolerance and worst_relative_error(gradients, expected) <= tolerance
    return gradients


# C03: what wants no gradient


@pytest.mark.parametrize("frozen", [("lora_A",), ("lora_B",), BOTH_FACTORS])
@pytest.mark.parametrize("where", ["layers.0", "layers."])
def test_c03_frozen_factors_get_no_gradient_and_change_no_other(ours, frozen, where):
    model, stock = adapted_model(ours), adapted_model(LoraConfig)
    for each in (model, stock):
        for name, parameter in each.named_parameters():
            if where in name and any(factor in name for factor in frozen):
                parameter.requires_grad_(False)
    if where == "layers." and frozen == BOTH_FACTORS:
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss_and_gradients(model, token_batch())
        return
    gradients = assert_lora_s(model, stock)
    assert len(gradients) == sum(parameter.requires_grad for parameter in model.parameters())


# C08: dropout


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_c08_dropout_gives_lora_s_gradients_of_input_and_factors(ours, probability, checkpointing):
    found = []
    for config in (LoraConfig, ours):
        model = adapted_model(config, lora_dropout=probability).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        batch = token_batch()
        x = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        torch.manual_seed(3)
        model(inputs_embeds=x, **batch).loss.backward()
        found.append({"x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert set(found[0]) == set(found[1]) and len(found[1]) == 29
    for name, gradient in found[1].items():
        assert (gradient - found[0][name]).abs().max() <= 1e-5, name
        assert probability < 1 or name == "x" or not gradient.any(), name  # nothing passes the branch
    assert torch.equal(logits_of(adapted_model(ours, lora_dropout=probability)), logits_of(adapted_model(ours)))


# C21 and C22: base layers that are quantised, or that nobody knows


class QuantLinear(nn.Module):
    """Integers and scales, no ``.weight``: what a quantiser puts in the place of a linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("scales", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("integers", (linear.weight.detach() / self.scales).round().to(torch.int8))

    def forward(self, x):
        return F.linear(x, self.integers.to(x.dtype) * self.scales.to(x.dtype))

    def dequantised(self):
        linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.integers * self.scales, requires_grad=False)
        return linear


class OddLinear(nn.Linear):
    """An ``nn.Linear`` by type that does not multiply with its weight, as some quantisers' are."""

    def forward(self, x):
        return F.linear(x, self.weight.sign() * self.weight.abs().mean(), self.bias)


class Halved(nn.Module):
    """A parametrization of the weight."""

    def forward(self, weight):
        return weight / 2


def replace_base_layers(model, change):
    """Give each adapted layer what `change` makes of its base layer."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.base_layer = change(layer.base_layer)
    return model


def odd(linear):
    linear.__class__ = OddLinear
    return linear


def parametrized(linear):
    parametrize.register_parametrization(linear, "weight", Halved())
    return linear


@pytest.mark.parametrize("lora_bias", [False, True])
def test_c21_gradients_over_a_quantised_base_are_lora_s_over_the_dequantised_weight(ours, lora_bias):
    settings = {"lora_bias": lora_bias, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    quantised = replace_base_layers(adapted_model(ours, **settings), QuantLinear)
    expected = adapted_model(LoraConfig, **settings)
    assert worst_relative_error(*(loss_and_gradients(m, token_batch())[1] for m in (quantised, expected))) > 1e-4
    assert_lora_s(quantised, replace_base_layers(expected, lambda linear: QuantLinear(linear).dequantised()))


def test_c21_a_merged_lora_bias_is_scaled(ours):
    """`alpha / r` is 2 here; merge and unmerge must use it for the bias as for the factors."""
    model = adapted_model(ours, family="qwen2", lora_bias=True, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.default.bias"):
                parameter.normal_()
    before = logits_of(model)
    model.merge_adapter()
    assert (logits_of(model) - before).abs().max() <= 1e-5
    model.unmerge_adapter()
    assert (logits_of(model) - before).abs().max() <= 1e-5
    assert (logits_of(model.merge_and_unload()) - before).abs().max() <= 1e-5


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("change", [QuantLinear, odd, parametrized])
def test_c22_unknown_base_layers_run_through_their_own_forward_and_the_status_says_so(ours, change, dropout):
    """What the blocks are not told of while they are attached is seen when they are attached again."""
    model = replace_base_layers(adapted_model(ours, lora_dropout=dropout), change)
    stock = replace_base_layers(adapted_model(LoraConfig, lora_dropout=dropout), change)
    assert_lora_s(model, stock)
    reasons = {linear.reason for linear in memeff_status(model).linears}
    assert len(reasons) == 1 and "is used through its own forward" in reasons.pop()


@pytest.mark.parametrize("change", [QuantLinear, odd, parametrized])
def test_c22_and_c21_merging_into_such_layers_is_refused_and_the_model_trains_on(ours, change):
    model = replace_base_layers(adapted_model(ours), change)
    before, gradients = logits_of(model), loss_and_gradients(model, token_batch())[1]
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"q_proj' to merge, a \w+, expected a plain linear.*Fix: load the base"):
            merge()
        assert torch.equal(logits_of(model), before)
    assert memeff_status(model).attached
    assert worst_relative_error(loss_and_gradients(model, token_batch())[1], gradients) == 0
    assert type(model.unload()) is type(tiny_model())


# C23: GPT-2's transposed weights


@pytest.mark.parametrize("targets", [["c_attn"], ["c_proj"], ["c_fc"], ["c_attn", "c_proj", "c_fc"]])
def test_c23_conv1d_trains_merges_and_gives_the_base_model_back(ours, targets):
    """c_proj is square in the attention: a missing transpose shows only in its numbers."""
    settings = {"family": "gpt2", "target_modules": targets}
    with pytest.warns(UserWarning, match="fan_in_fan_out is set to False but the target module is `Conv1D`"):
        model = adapted_model(ours, **settings)
    assert all(module.fan_in_fan_out for module in model.modules() if isinstance(module, LoraLayer))
    assert_lora_s(model, adapted_model(LoraConfig, **settings))
    base, adapted = logits_of(tiny_model("gpt2")), logits_of(model)
    assert (base - adapted).abs().max() > 1e-2
    model.merge_adapter()
    assert (logits_of(model) - adapted).abs().max() <= 1e-5
    with model.disable_adapter():
        assert (logits_of(model) - base).abs().max() <= 1e-5
    merged = model.merge_and_unload()
    assert (logits_of(merged) - adapted).abs().max() <= 1e-5
    assert {type(block.attn.c_proj) for block in merged.transformer.h} == {Conv1D}


# C25: modules_to_save


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_c25_a_saved_module_trains_is_switched_off_with_the_adapter_and_is_written_whole(ours, tmp_path, checkpointing):
    settings = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"]}
    model, stock = adapted_model(ours, **settings), adapted_model(LoraConfig, **settings)
    for each in (model, stock):
        head = each.get_submodule("base_model.model.lm_head")
        with torch.no_grad():
            head.modules_to_save["default"].weight.add_(0.1)
        assert not head.original_module.weight.requires_grad
        if checkpointing is not None:
            each.activation_checkpointing_enable({"use_reentrant": checkpointing})
    gradients = assert_lora_s(model, stock)
    assert sum("lm_head" in name for name in gradients) == 1
    # under DDP a parameter that a step leaves out stops the run
    assert len(gradients) == sum(parameter.requires_grad for parameter in model.parameters())
    with model.disable_adapter():
        assert torch.equal(logits_of(model), logits_of(tiny_model()))
    assert not torch.equal(logits_of(model), logits_of(tiny_model()))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(tensor.numel() for tensor in saved.values())
    assert torch.equal(saved["base_model.model.lm_head.weight"], model.base_model.model.lm_head.weight)
    again = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert torch.equal(logits_of(again), logits_of(model))


# C26: tied embeddings


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}, {"ensure_weight_tying": True}],
    ids=["head", "embeddings", "tied adapters"],
)
def test_c26_merging_an_adapter_on_tied_embeddings_keeps_every_logit(ours, tmp_path, settings):
    """PEFT's own merging adds it to the weight that both share, with a warning."""
    settings = {"target_modules": ["q_proj", "lm_head"], **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT names the two as tied
        model = get_peft_model(tiny_model(tie_word_embeddings=True), ours(**{**LORA, **settings}))
    fill_adapters(model)
    before, embeddings = logits_of(model), tiny_model(tie_word_embeddings=True).model.embed_tokens.weight
    with pytest.warns(UserWarning, match=r"merging has untied them \(tie_word_embeddings=False"):
        merged = model.merge_and_unload()
    assert (logits_of(merged) - before).abs().max() <= 1e-5
    if settings["target_modules"] == ["lm_head"]:
        assert torch.equal(merged.model.embed_tokens.weight, embeddings)
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not again.config.tie_word_embeddings and (logits_of(again) - before).abs().max() <= 1e-5


def test_c26_merging_in_place_into_tied_embeddings_warns_and_is_undone(ours):
    """What PEFT's own tests do with a LoRA adapter has to go through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = get_peft_model(tiny_model(tie_word_embeddings=True), ours(**{**LORA, "target_modules": ["lm_head"]}))
    fill_adapters(model)
    before = logits_of(model)
    with pytest.warns(UserWarning, match=r"embeddings are tied.*merging in place changes both.*merge_and_unload\(\)"):
        model.merge_adapter()
    assert (logits_of(model) - before).abs().max() > 1e-3
    model.unmerge_adapter()
    assert (logits_of(model) - before).abs().max() <= 1e-5


def test_c26_a_refused_merge_leaves_the_embeddings_tied(ours):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = get_peft_model(tiny_model(tie_word_embeddings=True), ours(**{**LORA, "target_modules": ["lm_head"]}))
    fill_adapters(model)
    base = model.get_base_model()
    with torch.no_grad():
        base.lm_head.lora_A["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_and_unload(safe_merge=True)
    assert base.config.tie_word_embeddings and base.lm_head.base_layer.weight is base.model.embed_tokens.weight
    assert memeff_status(model).attached


def test_c26_a_trained_head_of_a_tied_model_survives_merging_and_reloading(ours, tmp_path):
    model = get_peft_model(
        tiny_model(tie_word_embeddings=True),
        ours(**{**LORA, "target_modules": ["q_proj"]}, modules_to_save=["lm_head"]),
    )
    fill_adapters(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(0.1)
    before = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(tiny_model(tie_word_embeddings=True), tmp_path / "adapter")
    assert torch.equal(logits_of(again), before)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert (logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - before).abs().max() <= 1e-5


def test_c26_after_the_vocabulary_grew_loading_names_the_sizes_and_no_embeddings_are_stored_silently(ours, tmp_path):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(131)
    model = get_peft_model(base, ours(**{**LORA, "target_modules": ["q_proj"]}))
    model.save_pretrained(tmp_path / "small", save_embedding_layers=False)
    assert not any("embed" in key for key in load_file(tmp_path / "small" / "adapter_model.safetensors"))
    with pytest.warns(UserWarning, match="the embedding layer has been resized"):
        model.save_pretrained(tmp_path / "large")
    assert any("embed" in key for key in load_file(tmp_path / "large" / "adapter_model.safetensors"))
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch.*131, 64.*128, 64"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "large")


# C27: all-linear


def classifier(task_class=AutoModelForSequenceClassification):
    torch.manual_seed(0)
    return task_class.from_config(tiny_model(num_labels=3).config)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "classifier", "saved head"])
def test_c27_all_linear_finds_what_lora_finds(ours, kind):
    wrapped = []
    for config in (LoraConfig, ours):
        base = classifier() if kind == "classifier" else tiny_model(kind if kind in ("gpt2", "qwen3_moe") else "llama")
        settings = {**LORA, "task_type": "SEQ_CLS"} if kind == "classifier" else dict(LORA)
        if kind == "saved head":
            settings["modules_to_save"] = ["lm_head"]
        model = get_peft_model(base, config(**settings))
        wrapped.append([name for name, module in model.named_modules() if isinstance(module, LoraLayer)])
    assert wrapped[0] == wrapped[1] and len(wrapped[1]) >= 8
    assert not any("lm_head" in name or "score" in name for name in wrapped[1])
    assert any("experts" in name for name in wrapped[1]) == (kind == "qwen3_moe")  # parameters, found all the same
