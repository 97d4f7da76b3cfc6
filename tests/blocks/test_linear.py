"""How one projection is computed: read directly, used as a black box, or left to PEFT (C21, C22, C23)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from blocks._models import LENGTH, adapted, engine, errors, step, worst_error
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from helpers import token_batch
from hf_memeff.blocks.attach import engine_status
from hf_memeff.blocks.linear import LinearPlan, WeightLinear, plan_linear

TOLERANCE = ORDER_OF_SUMS[torch.float64]


class QuantLinear(nn.Module):
    """A base layer of a quantiser nobody knows: integers and scales, no ``.weight``, an in-place bias."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("scales", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("integers", (weight / self.scales).round().to(torch.int8))
        self.register_buffer("offset", None if linear.bias is None else linear.bias.detach())

    def forward(self, x):
        y = x @ (self.integers.to(x.dtype) * self.scales.to(x.dtype)).t()
        return y if self.offset is None else y.add_(self.offset)


class OddLinear(nn.Linear):
    """An ``nn.Linear`` by type whose forward does something else with its weight, as quanto's does."""

    def forward(self, x):
        return F.linear(x, self.weight.sign() * self.weight.abs().mean(), self.bias)


class Halved(nn.Module):
    """A parametrization of the weight."""

    def forward(self, weight):
        return 0.5 * weight


def replaced_forward(base):
    """As accelerate's hooks do for an offloaded layer."""
    own = type(base).forward
    base.forward = lambda x: 1.5 * own(base, x)


BASES = {
    "QuantLinear": lambda lora: setattr(lora, "base_layer", QuantLinear(lora.base_layer)),
    "OddLinear": lambda lora: setattr(lora.base_layer, "__class__", OddLinear),
    "ParametrizedLinear": lambda lora: parametrize.register_parametrization(lora.base_layer, "weight", Halved()),
    "replaced forward": lambda lora: replaced_forward(lora.base_layer),
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("where", ["everywhere", "one projection"])
@pytest.mark.parametrize("kind", BASES)
def test_c22_a_base_layer_nobody_knows_is_used_through_its_own_forward(kind, where, dropout):
    model = adapted("qwen2", lora_dropout=dropout)
    plain = step(model, token_batch(2, LENGTH))
    changed = 0
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and (where == "everywhere" or name.endswith("down_proj")):
            BASES[kind](module)
            changed += 1
    batch = token_batch(2, LENGTH, "right")
    assert relative_error(step(model, token_batch(2, LENGTH)).loss, plain.loss) > 1e-6
    with engine(model, strict=True) as base:
        linears = engine_status(base).linears
    assert {linear.path for linear in linears} == {"structured"}
    assert sum("own forward" in r.reason or "called as it is" in r.reason for r in linears) == changed
    assert worst_error(model, batch) <= TOLERANCE


def test_c21_gradients_are_those_of_the_dequantised_weight():
    model = adapted("llama")
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    for lora in layers:
        lora.base_layer = QuantLinear(lora.base_layer)
    with engine(model, strict=True):
        got = step(model, token_batch(2, LENGTH))
    for lora in layers:
        quantised = lora.base_layer
        lora.base_layer = nn.Linear(quantised.in_features, quantised.out_features, bias=False)
        lora.base_layer.weight = nn.Parameter(quantised.integers * quantised.scales, requires_grad=False)
    expected = step(model, token_batch(2, LENGTH))
    assert max(errors(got, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("targets", [["c_attn"], ["c_proj"], ["c_fc"], ["c_attn", "c_proj", "c_fc"]])
def test_c23_conv1d_and_its_square_c_proj(targets):
    """A missing transpose shows only as a wrong number in the square one."""
    model = adapted("gpt2", target_modules=targets)
    assert worst_error(model, token_batch(2, LENGTH)) <= TOLERANCE


def lora_layer(base=None, **settings):
    """A LoRA layer over one frozen linear layer."""
    base = nn.Linear(6, 4) if base is None else base
    config = LoraConfig(r=2, target_modules=["0"], fan_in_fan_out=isinstance(base, Conv1D), **settings)
    return inject_adapter_in_model(config, nn.Sequential(base.requires_grad_(False)))[0]


def test_plans_of_layers_that_are_read_directly():
    layer = lora_layer(lora_alpha=3)
    plan = plan_linear(layer)
    assert isinstance(plan, LinearPlan) and plan.direct and not plan.transposed and plan.reason == ""
    (term,) = plan.terms
    assert (term.adapter, term.scaling) == ("default", 1.5)
    assert [t.shape for t in plan.tensors()] == [(2, 6), (4, 2)]
    assert plan_linear(nn.Linear(6, 4).requires_grad_(False)).terms == ()


def test_a_conv1d_is_read_transposed():
    plan = plan_linear(lora_layer(Conv1D(4, 6)))
    assert plan.direct and plan.transposed


REFUSED = {
    "it has forward hooks": lambda layer: layer.register_forward_hook(lambda *_: None),
    "its base layer has forward hooks": lambda layer: layer.base_layer.register_forward_pre_hook(lambda *_: None),
    "its adapter has forward hooks": lambda layer: layer.lora_B["default"].register_forward_hook(lambda *_: None),
    "it has forward hooks, ": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "its base weights are trained": lambda layer: layer.base_layer.weight.requires_grad_(True),
    "its dropout is AlphaDropout": lambda layer: layer.lora_dropout.update({"default": nn.AlphaDropout(0.1)}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_layers_that_run_through_their_own_forward(reason):
    layer = lora_layer()
    REFUSED[reason](layer)
    plan = plan_linear(layer)
    assert isinstance(plan, str) and reason in plan


def test_weights_are_handed_out_by_a_call():
    """FSDP and ZeRO-3 gather a weight only while its module is called."""
    linear = WeightLinear(5, 3, bias=False)
    out = linear(None)
    assert torch.equal(out, linear.weight) and out.data_ptr() != linear.weight.data_ptr()
    out.sum().backward()
    assert torch.equal(linear.weight.grad, torch.ones(3, 5))
    x = torch.randn(2, 5)
    assert torch.equal(linear(x), F.linear(x, linear.weight))


def test_a_sharded_factor_is_fetched_through_its_module_and_a_whole_one_read():
    model = adapted("llama")
    with engine(model, strict=True):
        layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
        factor = layer.lora_A["default"]
        assert next(plan_linear(layer).tensors()) is factor.weight
        factor.weight.ds_id = 7  # what DeepSpeed leaves on a parameter it manages
        fetched = next(plan_linear(layer).tensors())
        assert fetched is not factor.weight and torch.equal(fetched, factor.weight)
        got = step(model, token_batch(2, LENGTH))
        del factor.weight.ds_id
    expected = step(model, token_batch(2, LENGTH))
    assert max(errors(got, expected).values()) <= TOLERANCE
