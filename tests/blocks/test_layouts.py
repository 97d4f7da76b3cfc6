"""Every named layout runs structured, and every wrong layer, layout or engine is caught by the self-check."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from blocks._models import LAYOUTS, LENGTH, adapted, engine, errors, paths, step, worst_error
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from blocks._wrong import WRONG_ENGINES, WRONG_LAYERS, turn_into, wrong_layouts
from helpers import token_batch
from hf_memeff.blocks import layouts
from hf_memeff.blocks.attach import engine_status
from hf_memeff.blocks.layouts import NormConvention, layout_of, norm_convention

UNGATED = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
"""Without the gate: a layout that forgets it has then to be found by what the block computes."""

TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "phi3": "all-linear"}


def decoder_layers(model):
    """The decoder layers of an adapted model."""
    return [m for m in model.modules() if layout_of(m) is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", LAYOUTS)
def test_strict_passes_with_all_blocks_structured(family, dtype):
    """In a step longer than the sliding window and with left padding."""
    model = adapted(family, dtype, adapter_dtype=torch.float32)
    with engine(model, strict=True) as base:
        step(model, token_batch(2, LENGTH, "left"))
        status = engine_status(base)
    assert [(b.path, b.reason) for b in status.blocks] == [("structured", "")] * 2
    assert {(linear.path, linear.reason) for linear in status.linears} == {("structured", "")}
    assert len(status.linears) == sum(hasattr(m, "lora_A") for m in model.modules())


def assert_caught(model, reason="the self-check found"):
    """Every block falls to whole-block recompute and says why, gradients stay the layer's own, strict refuses."""
    batch = token_batch(2, LENGTH)
    expected = step(model, batch)
    with engine(model) as base:
        status = engine_status(base)
        got = step(model, batch)
    assert {b.path for b in status.blocks} == {"recompute"}, status
    assert all(reason in b.reason for b in status.blocks), status
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float64]
    with (
        pytest.raises(RuntimeError, match=r"got a .* that cannot run structured .* strict=True. Pass strict=False"),
        engine(model, strict=True),
    ):
        pass


@pytest.mark.parametrize("wrong", WRONG_LAYERS)
@pytest.mark.parametrize("family", LAYOUTS)
def test_wrong_layers_are_caught(family, wrong):
    model = adapted(family)
    for layer in decoder_layers(model):
        WRONG_LAYERS[wrong](layer, layout_of(layer))
    assert_caught(model)


@pytest.mark.parametrize("family", LAYOUTS)
def test_wrong_layouts_are_caught(family, monkeypatch):
    residual_dropout = {"resid_pdrop": 0.1} if family in ("phi3", "gpt2") else {}
    model = adapted(family, target_modules=TARGETS.get(family, UNGATED), overrides=residual_dropout)
    layer = decoder_layers(model)[0]
    right = layout_of(layer)
    mistakes = wrong_layouts(right)
    assert len(mistakes) >= 4
    for mistake, wrong in mistakes.items():
        monkeypatch.setitem(layouts.LAYOUTS, type(layer).__name__, wrong)
        with engine(model) as base:
            blocks = engine_status(base).blocks
        assert {b.path for b in blocks} == {"recompute"}, mistake
        assert all("the self-check" in b.reason for b in blocks), (mistake, blocks)


@pytest.mark.parametrize("mistake", WRONG_ENGINES)
def test_a_mistake_in_the_engine_is_caught(mistake, monkeypatch):
    family, make = WRONG_ENGINES[mistake]
    model = adapted(family)
    make(monkeypatch)
    assert_caught(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", ["half_residual", "swapped_norms", "undropped_branch", "half_scaled_branch"])
def test_wrong_layers_are_caught_in_low_precision(wrong, dtype):
    model = adapted("qwen3", dtype, adapter_dtype=torch.float32)
    for layer in decoder_layers(model):
        WRONG_LAYERS[wrong](layer, layout_of(layer))
    with engine(model):
        assert paths(model) == ["recompute"] * 2


def test_one_wrong_layer_among_right_ones_is_found():
    model = adapted("llama")
    layer = decoder_layers(model)[1]
    WRONG_LAYERS["half_residual"](layer, layout_of(layer))
    with engine(model):
        assert paths(model) == ["structured", "recompute"]


def test_a_layer_without_a_part_of_its_layout_is_named():
    model = adapted("llama", target_modules=["q_proj"])
    for layer in decoder_layers(model):
        layer.mlp.first = layer.mlp.gate_proj
        del layer.mlp.gate_proj
        turn_into(layer.mlp, lambda own, mlp, x: mlp.down_proj(mlp.act_fn(mlp.first(x)) * mlp.up_proj(x)))
    assert_caught(model, "names mlp.gate_proj, which this layer does not have")


def test_a_layer_that_fails_in_the_check_runs_whole():
    """It needs an argument that only its model passes: the check cannot run it, which is no reason to stop the user."""
    model = adapted("llama")

    def forward(own, layer, h, *args, **kwargs):
        return own(h + 0.0 * kwargs["position_ids"].shape[1] * kwargs["attention_mask"].sum(), *args, **kwargs)

    for layer in decoder_layers(model):
        turn_into(layer, forward)
    batch = token_batch(2, LENGTH, "right")
    expected = step(model, batch)
    with engine(model) as base:
        reasons = {b.reason for b in engine_status(base).blocks}
        got = step(model, batch)
    assert all("the self-check could not run it (AttributeError" in reason for reason in reasons), reasons
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("signature", ["(self, *args, **kwargs)", "(self, h, *args, **kwargs)"])
def test_layers_with_an_open_signature_lose_no_argument(signature):
    model = adapted("llama")
    for layer in decoder_layers(model):
        parent = type(layer)

        def all_open(self, *args, parent=parent, **kwargs):
            return parent.forward(self, *args, **kwargs)

        def half_open(self, h, *args, parent=parent, **kwargs):
            return parent.forward(self, h, *args, **kwargs)

        forward = all_open if signature == "(self, *args, **kwargs)" else half_open
        layer.__class__ = type(parent.__name__, (parent,), {"forward": forward})
    assert worst_error(model, token_batch(2, LENGTH, "right"), strict=False) <= ORDER_OF_SUMS[torch.float64]
    assert_arguments_by_position_arrive(model)


def test_arguments_by_position_and_by_keyword():
    model = adapted("llama")
    assert_arguments_by_position_arrive(model)
    layer = decoder_layers(model)[0]
    assert_call_is_lora_s(model, lambda h, mask, ids, rotary: layer(hidden_states=h, position_embeddings=rotary))


def assert_arguments_by_position_arrive(model):
    """Mask, positions and rotary angles by position, as older code calls a layer."""
    layer = decoder_layers(model)[0]
    assert_call_is_lora_s(model, lambda h, mask, ids, rotary: layer(h, mask, ids, None, False, rotary))


def assert_call_is_lora_s(model, call):
    """A layer called on its own gives the same input gradient with and without the engine."""
    h = torch.randn(2, LENGTH, 64, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(LENGTH)[None]
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64)
    mask[:, :, :, 3] = -3.0
    given = (h, mask, ids, model.get_base_model().model.rotary_emb(h, ids))
    expected = torch.autograd.grad(call(*given).square().sum(), h)[0]
    with engine(model):
        got = torch.autograd.grad(call(*given).square().sum(), h)[0]
    assert relative_error(got, expected) <= ORDER_OF_SUMS[torch.float64]


class BiasedNorm(nn.Module):
    """A norm that is none of the known ones."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return (wide / (wide.abs().mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


NORMS = {
    LlamaRMSNorm: NormConvention("rms", 0.0, True, True),
    Olmo2RMSNorm: NormConvention("rms", 0.0, False, True),
    Gemma2RMSNorm: NormConvention("rms", 1.0, False, True),
    nn.LayerNorm: NormConvention("layer"),
    BiasedNorm: None,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", NORMS)
def test_a_norm_s_convention_is_found_by_what_it_computes(module, dtype):
    norm = module(33).to(dtype)
    before = norm.weight.clone()
    assert norm_convention(norm) == NORMS[module]
    assert torch.equal(norm.weight, before)


def test_torch_s_own_rms_norm_is_recognised_or_refused_but_not_mistaken():
    norm = nn.RMSNorm(33, eps=1e-6)
    nn.init.normal_(norm.weight)
    found = norm_convention(norm)
    if found is not None:
        x = torch.randn(4, 33)
        torch.testing.assert_close(layouts.norm_op(norm, found).forward(x), norm(x))


def test_an_unknown_norm_is_named():
    model = adapted("llama", target_modules=["q_proj"])
    for layer in decoder_layers(model):
        layer.input_layernorm = BiasedNorm(64).double().requires_grad_(False)
    assert_caught(model, "input_layernorm (BiasedNorm) is not a norm with a hand-derived gradient")
