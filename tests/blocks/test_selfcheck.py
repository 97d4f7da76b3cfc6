"""The self-check leaves no trace, runs once per distinct layout, waits for weights, and is quick."""

from __future__ import annotations

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from blocks._models import LAYOUTS, LENGTH, adapted, engine, errors, paths, step
from blocks._tolerances import ORDER_OF_SUMS
from blocks._wrong import WRONG_LAYERS, turn_into
from helpers import token_batch
from hf_memeff.blocks import attach, selfcheck
from hf_memeff.blocks.attach import attach_blocks, detach_blocks, engine_status
from hf_memeff.blocks.layouts import layout_of
from hf_memeff.blocks.options import EngineOptions


@pytest.fixture
def checks(monkeypatch):
    """Every self-check, as (layer, verdict), with the state of the layer compared before and after."""
    seen = []
    real = selfcheck.check_block

    def watched(forward, layer):
        before = snapshot(layer)
        verdict = real(forward, layer)
        assert_same(snapshot(layer), before)
        seen.append((layer, verdict))
        return verdict

    monkeypatch.setattr(selfcheck, "check_block", watched)
    monkeypatch.setattr(attach, "check_block", watched)
    return seen


def snapshot(layer):
    """Everything the check touches for a moment."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = list(layer.named_modules())
    return {
        "random state": torch.get_rng_state().tolist(),
        "modules": [(n, id(m), type(m), m.training) for n, m in modules],
        "attributes": [sorted(m.__dict__) for _, m in modules],
        "hooks": [(n, id(m.__dict__[h]), list(m.__dict__[h].items())) for n, m in modules for h in hooks],
        "weights": [(n, id(p), p.data_ptr(), p.requires_grad, p.dtype) for n, p in layer.named_parameters()],
        "bytes": [p.detach().view(torch.uint8).flatten().tolist() for p in layer.parameters()],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in layer.parameters()],
        "scalings": [dict(m.scaling) for _, m in modules if hasattr(m, "lora_A")],
        "dropout": [(n, m.p) for n, m in modules if isinstance(m, nn.Dropout)],
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def assert_same(after, before):
    for what, value in before.items():
        assert after[what] == value, what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LAYOUTS)
def test_the_check_leaves_no_trace(family, dtype, checks):
    model = adapted(family, dtype, adapter_dtype=torch.float32, lora_dropout=0.1)
    step(model, token_batch(2, LENGTH))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    calls = []
    next(m for m in model.modules() if layout_of(m) is not None).eval()  # a mode of its own, which must come back
    for layer in (m for m in model.modules() if layout_of(m) is not None):
        layer.register_forward_hook(lambda *args: calls.append(args))
    with engine(model):
        assert checks and {verdict for _, verdict in checks} == {""}
    assert not calls  # users' hooks on the layer did not see the check


@pytest.mark.parametrize("broken", ["fails", "differs"])
def test_a_check_that_fails_leaves_no_trace_either(broken, checks):
    model = adapted("gemma2", lora_dropout=0.1)
    for layer in (m for m in model.modules() if layout_of(m) is not None):
        if broken == "differs":
            WRONG_LAYERS["half_residual"](layer, layout_of(layer))
            continue

        def fail(own, mlp, x):
            raise ValueError("not like this")

        turn_into(layer.mlp, fail)
    with engine(model):
        assert all(verdict for _, verdict in checks)
        assert paths(model) == ["recompute"] * 2


@pytest.mark.parametrize("how", ["no_grad", "inference", "autocast", "eval"])
def test_attaching_works_in_any_mode(how, checks):
    model = adapted("llama")
    contexts = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "eval": torch.enable_grad,
    }
    model.train(how != "eval")
    with contexts[how]():
        attach_blocks(model.get_base_model(), EngineOptions(strict=True))
    assert {verdict for _, verdict in checks} == {""}
    assert model.training == (how != "eval")
    detach_blocks(model.get_base_model())


@pytest.mark.parametrize(
    ("family", "distinct"),
    # two kinds of layers where attention alternates: windowed and full, or with and without rotary embedding
    [("llama", 1), ("mistral", 1), ("gemma2", 2), ("gemma3", 2), ("smollm3", 2), ("gpt2", 1)],
)
def test_it_runs_once_per_distinct_layout(family, distinct, checks):
    more = {"no_rope_layers": [1, 0] * 2} if family == "smollm3" else {}
    if family in ("gemma2", "gemma3"):
        more = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model = adapted(family, overrides={"num_hidden_layers": 4, "n_layer": 4, **more})
    with engine(model, strict=True):
        assert paths(model) == ["structured"] * 4
        step(model, token_batch(2, LENGTH))
        step(model, token_batch(2, LENGTH))
    assert len(checks) == distinct


def test_layers_with_other_adapters_or_shapes_are_checked_apart(checks):
    model = adapted("llama", layers_to_transform=[0], target_modules=["q_proj", "down_proj"])
    model.add_adapter("b", LoraConfig(r=5, target_modules=["v_proj"], layers_to_transform=[1]))
    model.base_model.set_adapter(["default", "b"])
    with engine(model):
        assert paths(model) == ["structured"] * 2
    assert len(checks) == 2


def meta_model(lora_model):
    """The same adapted model without weights."""
    with torch.device("meta"):
        model = type(lora_model.get_base_model())(lora_model.get_base_model().config)
        fields = lora_model.peft_config["default"].to_dict()
        config = LoraConfig(
            r=fields["r"], lora_alpha=fields["lora_alpha"], target_modules=list(fields["target_modules"])
        )
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    return model.double().train()


def load(model, source):
    """Bring the weights and buffers of ``source`` to a model on meta."""
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    for (_, buffer), (_, value) in zip(model.named_buffers(), source.named_buffers(), strict=True):
        buffer.copy_(value)  # rotary frequencies are in no state dict


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_it_waits_for_weights_that_are_on_meta(family, checks):
    source = adapted(family)
    expected = step(source, token_batch(2, LENGTH))
    model = meta_model(source)
    assert next(model.parameters()).is_meta
    attach_blocks(model.get_base_model(), EngineOptions())
    assert not checks
    reasons = {(b.path, b.reason) for b in engine_status(model.get_base_model()).blocks}
    assert reasons == {("structured", "the self-check waits for the first forward")}
    load(model, source)
    with torch.no_grad():
        model(**token_batch(2, LENGTH))  # no training call: nothing to check yet
    assert not checks
    got = step(model, token_batch(2, LENGTH))
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float64]
    assert 1 <= len(checks) <= 2 and {verdict for _, verdict in checks} == {""}
    step(model, token_batch(2, LENGTH))
    assert 1 <= len(checks) <= 2
    assert {(b.path, b.reason) for b in engine_status(model.get_base_model()).blocks} == {("structured", "")}


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_layer_on_meta_is_caught_in_the_first_step(strict, checks):
    source = adapted("llama")
    for layer in (m for m in source.modules() if layout_of(m) is not None):
        WRONG_LAYERS["half_residual"](layer, layout_of(layer))
    expected = step(source, token_batch(2, LENGTH))
    model = meta_model(source)
    for layer in (m for m in model.modules() if layout_of(m) is not None):
        WRONG_LAYERS["half_residual"](layer, layout_of(layer))
    attach_blocks(model.get_base_model(), EngineOptions(strict=strict))
    load(model, source)
    if strict:
        with pytest.raises(RuntimeError, match="strict=True"):
            step(model, token_batch(2, LENGTH))
        return
    got = step(model, token_batch(2, LENGTH))
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float64]
    blocks = engine_status(model.get_base_model()).blocks
    assert all(b.path == "recompute" and "the self-check found" in b.reason for b in blocks)


def test_a_deferred_check_does_not_disturb_the_step_it_runs_in():
    """It happens inside the first training forward: its random numbers must not shift that step's dropout."""
    source = adapted("llama", lora_dropout=0.0)
    model = meta_model(source)
    for module in (*source.modules(), *model.modules()):
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.3)
    expected = step(source, token_batch(2, LENGTH))
    attach_blocks(model.get_base_model(), EngineOptions(strict=True))
    load(model, source)
    got = step(model, token_batch(2, LENGTH))
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float64]
    assert torch.equal(got.random, expected.random)


class Lone(nn.Module):
    """One decoder layer, as a model of one."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])


@pytest.mark.slow
def test_a_7b_layer_is_checked_in_seconds():
    """At most 2 s on an idle machine; the bound leaves room for a busy one."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Lone(config).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=16, target_modules=targets), model)
    start = time.perf_counter()
    attach_blocks(model, EngineOptions(strict=True))
    seconds = time.perf_counter() - start
    assert [b.path for b in engine_status(model).blocks] == ["structured"]
    assert seconds < 20, f"attaching took {seconds:.1f} s"
