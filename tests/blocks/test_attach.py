"""Attaching changes instances, not classes; copies follow their own weights; detaching leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from peft import LoraConfig
from torch import nn

from blocks._models import LAYOUTS, LENGTH, adapted, engine, errors, paths, step
from blocks._tolerances import ORDER_OF_SUMS
from helpers import token_batch
from hf_memeff.blocks.attach import attach_blocks, detach_blocks, engine_status, is_attached
from hf_memeff.blocks.layouts import layout_of
from hf_memeff.blocks.linear import WeightLinear
from hf_memeff.blocks.options import EngineOptions

TOLERANCE = ORDER_OF_SUMS[torch.float64]


def attach(model, **options):
    """Attach for good; strict unless told otherwise."""
    attach_blocks(model.get_base_model(), EngineOptions(**{"strict": True, **options}))
    return model


def anatomy(model):
    """Every module's class, attributes and hooks, by identity."""
    found = {}
    for name, module in model.named_modules():
        attributes = {}
        for key, value in module.__dict__.items():
            attributes[key] = tuple(value.items()) if isinstance(value, dict) else id(value)
        found[name] = type(module), attributes
    return found


@pytest.mark.parametrize("family", LAYOUTS)
def test_detaching_restores_every_module_exactly(family):
    model = adapted(family, lora_dropout=0.1)
    layer = next(m for m in model.modules() if layout_of(m) is not None)
    layer.register_forward_pre_hook(lambda m, args: None)
    model.get_base_model().register_forward_hook(lambda m, args, out: None)
    step(model, token_batch(2, LENGTH))  # whatever the model itself keeps from a call is there by now
    before, classes = anatomy(model), {type(m): dict(type(m).__dict__) for m in model.modules()}
    attach(model)
    assert anatomy(model) != before
    step(model, token_batch(2, LENGTH))
    detach_blocks(model.get_base_model())
    assert anatomy(model) == before
    assert {cls: dict(cls.__dict__) for cls in classes} == classes  # no class was touched


def test_an_instance_forward_of_somebody_else_comes_back():
    """Such as accelerate's, or a user's own patch."""
    model = adapted("llama")
    layer = model.get_base_model().model.layers[0]
    calls = []

    def patched(*args, **kwargs):
        calls.append(1)
        return type(layer).forward(layer, *args, **kwargs)

    layer.forward = patched
    base_forward = model.get_base_model().forward = _ModelPatch(model.get_base_model())
    expected = step(model, token_batch(2, LENGTH))
    attach_blocks(model.get_base_model(), EngineOptions())
    got = step(model, token_batch(2, LENGTH))
    assert max(errors(got, expected).values()) <= TOLERANCE
    detach_blocks(model.get_base_model())
    assert layer.__dict__["forward"] is patched
    assert model.get_base_model().__dict__["forward"] is base_forward
    step(model, token_batch(2, LENGTH))
    assert len(calls) >= 2 and base_forward.calls == 3


class _ModelPatch:
    """A forward that counts its calls."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return type(self.model).forward(self.model, *args, **kwargs)


def test_detaching_what_is_not_attached_does_nothing():
    model = adapted("llama")
    before = anatomy(model)
    detach_blocks(model.get_base_model())
    assert anatomy(model) == before
    assert not is_attached(model.get_base_model()) and not engine_status(model.get_base_model()).attached


def hooks_of(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_attaching_twice_takes_the_new_options_and_doubles_nothing():
    model = adapted("llama", lora_dropout=0.2)
    before, batch = anatomy(model), token_batch(2, LENGTH)
    expected = step(model, batch)
    attach(model)
    hooks = hooks_of(model)
    attach(model, activation_store="cpu", tiled_loss="never")
    assert hooks_of(model) <= hooks
    status = engine_status(model.get_base_model())
    assert status.activation_store == "cpu" and status.tiled_loss.path == "logits"
    assert max(errors(step(model, batch), expected).values()) <= TOLERANCE
    attach(model)
    assert hooks_of(model) == hooks and len(engine_status(model.get_base_model()).blocks) == 2
    detach_blocks(model.get_base_model())
    assert anatomy(model) == before


def test_attaching_again_looks_at_the_adapters_afresh():
    model = attach(adapted("llama", target_modules=["q_proj"]))
    assert len(engine_status(model.get_base_model()).linears) == 2
    model.add_adapter("b", LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    model.double()
    model.base_model.set_adapter(["default", "b"])
    attach(model)
    linears = engine_status(model.get_base_model()).linears
    assert len(linears) == 4 and {linear.path for linear in linears} == {"structured"}
    factors = [m.lora_A[n] for m in model.modules() if hasattr(m, "lora_A") for n in m.lora_A]
    assert len(factors) == 4 and all(type(f) is WeightLinear for f in factors)
    with engine(model, strict=True):
        pass  # leaves it detached
    assert all(type(f) is nn.Linear for f in factors)


def test_a_failed_attaching_leaves_no_trace():
    model = adapted("llama")
    model.get_base_model().model.layers[1].input_layernorm.weight.requires_grad_(True)
    before = anatomy(model)
    with pytest.raises(RuntimeError, match=r"model\.layers\.1 .*is trained.*strict=True"):
        attach(model)
    assert anatomy(model) == before
    with pytest.raises(OSError):
        attach(adapted("llama"), activation_store="disk", activation_store_dir="/dev/null/nowhere")


def perturb(model, seed=9):
    """New values for every weight, base and adapters, where they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.05)


def replicate(model):
    """What ``torch.nn.parallel.replicate`` makes, on the same device: shallow copies with plain tensors for parameters.

    Returns the replica and its tensors by the parameters' names.
    """
    tensors = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    by_parameter = {id(p): tensors[n] for n, p in model.named_parameters()}
    replicas = {id(m): m._replicate_for_data_parallel() for m in model.modules()}
    for module in model.modules():
        replica = replicas[id(module)]
        for key, child in module._modules.items():
            setattr(replica, key, replicas[id(child)])
        replica._former_parameters = {}
        for key, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[key] = None
            else:
                setattr(replica, key, by_parameter[id(parameter)])
                replica._former_parameters[key] = by_parameter[id(parameter)]
    return replicas[id(model)], tensors


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_c45_a_replica_follows_its_own_weights(family):
    model, batch = adapted(family), token_batch(2, LENGTH)
    changed = copy.deepcopy(model)
    perturb(changed)
    expected, values = step(changed, batch), dict(changed.named_parameters())
    attach(model)
    replica, leaves = replicate(model)
    with torch.no_grad():
        for name, tensor in leaves.items():
            tensor.copy_(values[name])
    torch.manual_seed(11)  # as `step` does: GPT-2 has dropout by default
    loss = replica(**batch).loss
    loss.backward()
    gradients = {n: t.grad.double() for n, t in leaves.items() if t.grad is not None}
    assert abs(loss.item() - expected.loss.item()) <= 1e-7
    assert set(gradients) == set(expected.gradients)
    assert max((gradients[n] - g).norm() / g.norm() for n, g in expected.gradients.items()) <= TOLERANCE
    assert all(p.grad is None for p in model.parameters())


def test_c45_replicas_in_threads_do_not_disturb_each_other():
    model = attach(adapted("llama"))
    batches = [token_batch(2, LENGTH, seed=s) for s in (1, 2)]
    alone = []
    for batch in batches:
        replica, leaves = replicate(model)
        replica(**batch).loss.backward()
        alone.append({n: t.grad for n, t in leaves.items() if t.grad is not None})
    replicas, losses, barrier = [replicate(model) for _ in batches], [None, None], threading.Barrier(2)

    def run(index):
        barrier.wait()
        losses[index] = replicas[index][0](**batches[index]).loss

    for _ in range(3):  # whatever a call leaves behind, the next one meets
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sum(losses).backward()
    for (_, leaves), expected in zip(replicas, alone, strict=True):
        found = {n: t.grad for n, t in leaves.items() if t.grad is not None}
        assert set(found) == set(expected)
        assert max((found[n] - g).norm() / g.norm() for n, g in expected.items()) <= TOLERANCE


def by_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": by_torch_save,
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_follows_its_own_weights(family, way):
    model, batch = adapted(family, lora_dropout=0.2), token_batch(2, LENGTH)
    original = step(model, batch)
    changed = copy.deepcopy(model)
    perturb(changed)
    expected = step(changed, batch)
    attach(model)
    duplicate = COPIES[way](model)
    perturb(duplicate)
    assert paths(duplicate) == ["structured"] * 2
    assert max(errors(step(duplicate, batch), expected).values()) <= TOLERANCE
    assert max(errors(step(model, batch), original).values()) <= TOLERANCE
    detach_blocks(model.get_base_model())
    assert paths(duplicate) == ["structured"] * 2  # the original's engine is not the copy's
    assert max(errors(step(duplicate, batch), expected).values()) <= TOLERANCE
    detach_blocks(duplicate.get_base_model())
    assert not is_attached(duplicate.get_base_model())
    assert max(errors(step(duplicate, batch), expected).values()) == 0.0


def test_copying_a_layer_alone():
    model = attach(adapted("llama"))
    layer = model.get_base_model().model.layers[0]
    twin = copy.deepcopy(layer)
    perturb(twin)
    h = torch.randn(1, 5, 64, dtype=torch.float64, requires_grad=True)
    rotary = model.get_base_model().model.rotary_emb(h, torch.arange(5)[None])
    own = type(layer).forward(twin, h, position_embeddings=rotary)
    assert torch.allclose(twin(h, position_embeddings=rotary), own, rtol=1e-12)
    assert not torch.allclose(layer(h, position_embeddings=rotary), own, rtol=1e-3)


def test_the_engine_keeps_no_model_alive():
    model = attach(adapted("llama"))
    step(model, token_batch(2, LENGTH))
    layer = weakref.ref(model.get_base_model().model.layers[0])
    base = weakref.ref(model.get_base_model())
    del model
    gc.collect()
    assert layer() is None and base() is None


def test_calling_a_forward_taken_off_its_layer_is_refused():
    model = attach(adapted("llama"))
    layer = model.get_base_model().model.layers[0]
    with pytest.raises(RuntimeError, match=r"without its forward pre-hook.* undo hf_memeff with detach"):
        layer.forward(torch.zeros(1, 3, 64, dtype=torch.float64))


def test_state_dict_and_parameters_are_what_they_were():
    model = adapted("llama")
    names, tensors = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    attach(model)
    assert list(model.state_dict()) == names and [p.data_ptr() for p in model.parameters()] == tensors
    other = adapted("llama")
    perturb(other)
    model.load_state_dict(other.state_dict())
    expected = step(other, token_batch(2, LENGTH))
    assert max(errors(step(model, token_batch(2, LENGTH)), expected).values()) <= TOLERANCE


def test_moving_and_casting_an_attached_model():
    model = attach(adapted("llama", torch.float32))
    model.double()
    expected = step(copied_without_engine(model), token_batch(2, LENGTH))
    assert max(errors(step(model, token_batch(2, LENGTH)), expected).values()) <= TOLERANCE


def copied_without_engine(model):
    duplicate = copy.deepcopy(model)
    detach_blocks(duplicate.get_base_model())
    return duplicate


def test_the_status_is_printed_as_a_table():
    model = attach(adapted("llama"))
    text = str(engine_status(model.get_base_model()))
    assert "2 blocks, activation store memory" in text
    assert "2 x structured" in text and "14 x structured" in text and "1 x tiled" in text
    detach_blocks(model.get_base_model())
    assert str(engine_status(model.get_base_model())) == "hf_memeff: not attached to this model"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c48_torch_compile_trains_with_equal_gradients(backend):
    torch._dynamo.reset()
    model, batch = adapted("llama", overrides={"num_hidden_layers": 1}), token_batch(2, LENGTH)
    expected = step(model, batch)
    attach(model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        got = step(compiled, batch)
        named = {n.removeprefix("_orig_mod."): g for n, g in got.gradients.items()}
        assert max(errors(got._replace(gradients=named), expected).values()) <= TOLERANCE
    torch._dynamo.reset()
