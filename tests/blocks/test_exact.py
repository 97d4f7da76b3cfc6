"""Loss and every gradient of a structured model equal PEFT LoRA's: all layouts, masks, attentions, dtypes, adapters."""

from __future__ import annotations

import contextlib

import pytest
import torch
from peft import LoraConfig

from blocks._models import (
    LAYOUTS,
    LENGTH,
    adapted,
    engine,
    errors,
    lively_model,
    packed_batch,
    paths,
    step,
    worst_error,
    worst_errors,
)
from blocks._tolerances import LORA_ROUNDING_FACTOR, ORDER_OF_SUMS, relative_error
from helpers import token_batch

DTYPES = (torch.float64, torch.float32)
ATTENTIONS = ("eager", "sdpa")


def batches():
    """Every way rows can be filled, by name."""
    packed = packed_batch() | {"use_cache": False}  # with a cache object, transformers itself mixes packed samples
    return {pad: token_batch(2, LENGTH, pad) for pad in ("none", "left", "right")} | {"packed": packed}


def model_with(family, dtype, attention, overrides=None, **lora):
    """The adapted model, or a skip where transformers has no such attention for it."""
    try:
        return adapted(family, dtype, overrides={"attn_implementation": attention, **(overrides or {})}, **lora)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        pytest.skip(f"transformers has no {attention} for {family}")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", LAYOUTS)
def test_gradients_are_lora_s(family, dtype, attention):
    model = model_with(family, dtype, attention)
    given = batches()
    if attention == "eager" and dtype == torch.float64:
        del given["left"]  # NaN in transformers itself: its mask value overflows the float32 softmax
    found = worst_errors(model, given)
    assert max(found.values()) <= ORDER_OF_SUMS[dtype], found


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("family", LAYOUTS)
def test_flex_attention(family):
    model = model_with(family, torch.float64, "flex_attention")
    found = worst_errors(model, {name: batches()[name] for name in ("left", "packed")})
    assert max(found.values()) <= ORDER_OF_SUMS[torch.float64], found


@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_s_reference_is_right():
    batch = token_batch(2, LENGTH, "left")
    flex, sdpa = (step(model_with("llama", torch.float64, name), batch) for name in ("flex_attention", "sdpa"))
    assert max(errors(flex, sdpa).values()) <= ORDER_OF_SUMS[torch.float64]


def test_flex_attention_as_torch_runs_it():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.zeros(1, 1, 16, 16, requires_grad=True)
    try:
        flex_attention(q, q, q).sum().backward()
    except NotImplementedError as error:
        pytest.skip(f"stock LoRA has no flex_attention here either: {error}")
    model = model_with("llama", torch.float32, "flex_attention")
    assert worst_error(model, token_batch(2, 128, "left")) <= ORDER_OF_SUMS[torch.float32]


def test_padding_packing_and_window_reach_the_attention():
    """The comparisons above would be empty if masks or windows changed nothing in stock LoRA itself."""
    model = adapted("mistral", overrides={"attn_implementation": "sdpa"})
    plain = token_batch(2, LENGTH)
    loss = step(model, plain).loss
    for change in (
        {"attention_mask": token_batch(2, LENGTH, "left")["attention_mask"]},
        {"attention_mask": None, "position_ids": packed_batch()["position_ids"], "use_cache": False},
    ):
        assert relative_error(step(model, plain | change).loss, loss) > 1e-4
    wide = adapted("mistral", overrides={"attn_implementation": "sdpa", "sliding_window": 4096})
    assert relative_error(step(wide, plain).loss, loss) > 1e-4


DROPOUTS = {
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "phi3": {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", LAYOUTS)
def test_c08_dropout_everywhere_with_the_same_seed(family, attention):
    """LoRA's dropout, attention dropout and residual dropout, each drawn in LoRA's order."""
    dropouts = DROPOUTS.get(family, {"attention_dropout": 0.2})
    model = model_with(family, torch.float64, attention, overrides=dropouts, lora_dropout=0.3)
    batch = token_batch(2, LENGTH, "right")
    assert worst_error(model, batch) <= ORDER_OF_SUMS[torch.float64]
    other = max(errors(step(model, batch, seed=12), step(model, batch)).values())
    assert other > 1e-2  # another seed is another result


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_c08_dropout_in_float32(family):
    model = adapted(family, torch.float32, lora_dropout=0.3)
    assert worst_error(model, token_batch(2, LENGTH, "left")) <= ORDER_OF_SUMS[torch.float32]


def test_c08_dropout_of_one_leaves_the_branch_out():
    """With p = 1 LoRA's own gradients are all zero, and so are ours."""
    model = adapted("llama", lora_dropout=1.0)
    with engine(model, strict=True):
        gradients = step(model, token_batch(2, LENGTH)).gradients
    assert len(gradients) == 28 and not any(g.any() for g in gradients.values())


TRL = "bf16 base, autocast"  # what its trainers do by default
HALVES = {
    TRL: (torch.bfloat16, torch.float32, torch.bfloat16),
    "bf16 base": (torch.bfloat16, torch.float32, None),
    "bf16 base and adapters": (torch.bfloat16, torch.bfloat16, None),
    "bf16 autocast": (torch.float32, torch.float32, torch.bfloat16),
    "fp16 autocast": (torch.float32, torch.float32, torch.float16),
    "fp16 base, autocast": (torch.float16, torch.float32, torch.float16),
}


@pytest.mark.parametrize(
    ("family", "setting"),
    [(f, "bf16 base, autocast") for f in LAYOUTS]
    + [(f, s) for f in ("qwen2", "gemma3", "gpt2") for s in list(HALVES)[1:]],
)
def test_c16_half_precision_stays_within_lora_s_own_rounding(family, setting):
    base, adapter_dtype, autocast = HALVES[setting]
    model = adapted(family, base, adapter_dtype=adapter_dtype, lora_dropout=0.2)
    batch = token_batch(3, LENGTH, "right")
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        stock = step(model, batch)
        with engine(model, strict=True):
            ours = step(model, batch)
            assert paths(model) == ["structured"] * 2
    exact = adapted(family, torch.float64, model=lively_model(family, base).double(), lora_dropout=0.2)
    values = dict(model.named_parameters())
    for name, parameter in exact.named_parameters():
        parameter.data = values[name].data.double()
    best = step(exact, batch)
    lora_error, our_error = (errors(s, best) for s in (stock, ours))
    assert mean(lora_error) > 1e-5  # it does compute in half precision
    assert mean(our_error) <= LORA_ROUNDING_FACTOR * mean(lora_error)
    assert max(our_error.values()) <= 2 * max(lora_error.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, name


def mean(found):
    return sum(found.values()) / len(found)


SUBSETS = {
    "q and v": ["q_proj", "v_proj"],
    "down": ["down_proj"],
    "o and gate": ["o_proj", "gate_proj"],
    "up": ["up_proj"],
    "k": ["k_proj"],
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("subset", SUBSETS)
def test_adapters_on_a_subset_of_the_projections(subset, dropout):
    model = adapted("qwen2", target_modules=SUBSETS[subset], lora_dropout=dropout)
    assert worst_error(model, token_batch(2, LENGTH, "right")) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("targets", [["qkv_proj"], ["gate_up_proj"], ["down_proj"]])
def test_adapters_on_a_subset_of_fused_projections(targets):
    model = adapted("phi3", target_modules=targets, lora_dropout=0.2)
    assert worst_error(model, token_batch(2, LENGTH, "right")) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_several_active_adapters_of_different_shape(dropout):
    model = adapted("llama", lora_dropout=dropout)
    model.add_adapter("b", LoraConfig(r=2, lora_alpha=9, lora_dropout=dropout, target_modules=["q_proj", "down_proj"]))
    model.base_model.set_adapter(["default", "b"])
    for name, parameter in model.named_parameters():
        if ".b." in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.2
    expected = step(model, token_batch(2, LENGTH))
    assert any(".b." in n for n in expected.gradients) and any(".default." in n for n in expected.gradients)
    assert worst_error(model, token_batch(2, LENGTH)) <= ORDER_OF_SUMS[torch.float64]


def test_switching_the_active_adapter_needs_no_new_attaching():
    model = adapted("llama")
    model.add_adapter("b", LoraConfig(r=2, lora_alpha=9, target_modules=["v_proj", "up_proj"], init_lora_weights=False))
    model.base_model.double()
    batch = token_batch(2, LENGTH)
    expected = {}
    for name in ("b", "default"):
        model.set_adapter(name)
        expected[name] = step(model, batch)
    with engine(model, strict=True):
        for name in ("b", "default", "b"):
            model.set_adapter(name)
            assert max(errors(step(model, batch), expected[name]).values()) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("rslora", [False, True])
def test_c28_rank_and_alpha_patterns(rslora):
    model = adapted(
        "qwen3",
        use_rslora=rslora,
        rank_pattern={"q_proj": 5, "layers.1.mlp.up_proj": 1},
        alpha_pattern={"down_proj": 11, "k_proj": 2},
    )
    scalings = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert len(scalings) >= 4
    assert worst_error(model, token_batch(2, LENGTH)) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("layer", [0, 1])
def test_adapters_in_one_layer_alone(layer):
    """The other block has nothing to train: above the adapters it hands the gradient on, below them it needs none."""
    model = adapted("llama", layers_to_transform=[layer], target_modules=["q_proj", "v_proj", "down_proj"])
    expected = step(model, token_batch(2, LENGTH))
    with engine(model):
        got = step(model, token_batch(2, LENGTH))
        found = paths(model)
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float64]
    assert found[layer] == "structured"


def test_adapters_switched_off_in_one_layer():
    model = adapted("llama")
    for module in model.get_base_model().model.layers[0].modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    expected = step(model, token_batch(2, LENGTH))
    assert all("layers.1" in n for n in expected.gradients)
    assert worst_error(model, token_batch(2, LENGTH), strict=False) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "layers.0.", "layers.1.", "q_proj"])
def test_c03_frozen_factors(frozen, dropout):
    model = adapted("llama", lora_dropout=dropout)
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    expected = step(model, token_batch(2, LENGTH))
    assert not any(frozen in n for n in expected.gradients)
    assert worst_error(model, token_batch(2, LENGTH)) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_c03_the_first_block_s_input_wants_a_gradient_or_not(family):
    model = adapted(family)
    batch = token_batch(2, LENGTH)
    without = step(model, batch)
    model.enable_input_require_grads()
    assert worst_error(model, batch) <= ORDER_OF_SUMS[torch.float64]
    with engine(model, strict=True):
        assert max(errors(step(model, batch), without).values()) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_gradient_of_the_embeddings_passed_in(family):
    model = adapted(family)
    ids = token_batch(2, LENGTH)
    embedded = model.get_input_embeddings()(ids["input_ids"]).detach()
    found = []
    for attached in (False, True):
        leaf = embedded.clone().requires_grad_()
        batch = {"inputs_embeds": leaf, "attention_mask": ids["attention_mask"], "labels": ids["labels"]}
        with engine(model, strict=True) if attached else contextlib.nullcontext():
            step(model, batch)
        found.append(leaf.grad)
    assert relative_error(found[1], found[0]) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("overrides", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 24}])
def test_head_layouts(overrides):
    model = adapted("llama", overrides=overrides)
    assert worst_error(model, token_batch(2, LENGTH)) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("overrides", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_tied_embeddings(overrides):
    model = adapted("llama", overrides=overrides)
    assert worst_error(model, token_batch(2, LENGTH)) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_activations(family, activation):
    name = "activation_function" if family == "gpt2" else "hidden_act"
    model = adapted(family, overrides={name: activation})
    assert worst_error(model, token_batch(2, LENGTH)) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("tile", [1, 5, 10_000])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
def test_tiles_of_any_size(family, tile):
    model = adapted(family, lora_dropout=0.2)
    assert worst_error(model, token_batch(2, LENGTH), mlp_tile_tokens=tile) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("store", ["memory", "cpu", "disk"])
def test_stores_give_the_same_bits(store, tmp_path):
    model = adapted("llama", torch.float32, lora_dropout=0.2)
    batch = token_batch(2, LENGTH)
    with engine(model, strict=True):
        expected = step(model, batch)
    folder = str(tmp_path) if store == "disk" else None
    with engine(model, strict=True, activation_store=store, activation_store_dir=folder):
        got = step(model, batch)
    assert max(errors(got, expected).values()) == 0.0


@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (3, 1)])
def test_sequences_of_one_and_two_tokens(rows):
    model = adapted("llama")
    batch = token_batch(*rows)
    batch["labels"] = batch["shift_labels"] = batch["input_ids"]  # a single token has no next one to predict
    expected = step(model, batch)
    with engine(model, strict=True):
        got = step(model, batch)
    # where a token sees itself alone, gradients of queries and keys are zero up to rounding: nothing to be relative to
    largest = max(g.norm() for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert (got.gradients[name] - gradient).norm() <= ORDER_OF_SUMS[torch.float64] * largest, name
