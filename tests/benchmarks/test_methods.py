"""Every way to train gives LoRA's gradient and does what its name says."""

from __future__ import annotations

import pytest
import torch

from hf_memeff import memeff_status
from hf_memeff.benchmarks.cases import MODELS, Case
from hf_memeff.benchmarks.methods import GRADIENT_REFERENCE, METHODS, TIME_REFERENCE, Trainee, make_trainee
from hf_memeff.benchmarks.run import Reference
from hf_memeff.memory import measure_peak_memory

CASE = Case("tiny", "fp32", 96, 4)
ON_CPU = [name for name, method in METHODS.items() if not method.gpu_only]


def one_gradient(trainee: Trainee) -> torch.Tensor:
    trainee.clear()
    trainee.step()
    return trainee.gradient()


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    return MODELS["tiny"].build(torch.float32).eval()


@pytest.fixture(scope="module")
def anchor(base):
    return make_trainee(METHODS[GRADIENT_REFERENCE], base, CASE)


def test_both_checkpointing_variants_and_lora_come_with_and_without_a_tiled_loss() -> None:
    kinds = {(m.checkpointing, m.tiled_loss) for m in METHODS.values() if m.tuner == "lora"}
    assert kinds == {(c, t) for c in (None, "non-reentrant", "reentrant") for t in (False, True)}
    assert {m.store for m in METHODS.values() if m.tuner == "mesp"} == {"memory", "disk", "cpu"}
    assert METHODS[TIME_REFERENCE].checkpointing == "non-reentrant"


@pytest.mark.parametrize("name", ON_CPU)
def test_gradients_are_lora_s_and_repeat(name: str, base, anchor) -> None:
    trainee = make_trainee(METHODS[name], base, CASE, like=anchor)
    reference = Reference.of(base, CASE, anchor)
    gradient = one_gradient(trainee)
    assert reference.error(gradient) <= reference.limit
    assert torch.equal(gradient, one_gradient(trainee))
    trainee.step()
    assert torch.allclose(trainee.gradient(), 2 * gradient)
    assert reference.gradient.norm() > 0


def test_the_names_are_true(base, anchor) -> None:
    models = {name: make_trainee(METHODS[name], base, CASE, like=anchor).model for name in ON_CPU}
    for name, model in models.items():
        blocks = model.get_base_model().model.layers
        checkpointed = [getattr(block, "gradient_checkpointing", False) for block in blocks]
        assert checkpointed == [METHODS[name].checkpointing is not None] * len(blocks)
        status = memeff_status(model)
        if METHODS[name].tuner == "lora":
            assert not status.attached
        else:
            assert {block.path for block in status.blocks} == {"structured"}
            assert (status.tiled_loss.path, status.activation_store) == ("tiled", METHODS[name].store)
    kwargs = {
        name: models[name].get_base_model().model.layers[0]._gradient_checkpointing_func.keywords
        for name in (TIME_REFERENCE, "lora-reentrant")
    }
    assert kwargs == {TIME_REFERENCE: {"use_reentrant": False}, "lora-reentrant": {"use_reentrant": True}}


def test_each_saving_saves(base, anchor) -> None:
    peaks = {}
    for name in ON_CPU:
        trainee = make_trainee(METHODS[name], base, CASE, like=anchor)
        trainee.step()
        peaks[name] = measure_peak_memory(trainee.step, "cpu").peak_bytes
    for name in ("lora", "lora-checkpointing", "lora-reentrant"):
        assert peaks[name + "-tiled"] < peaks[name]
    assert peaks["lora-checkpointing"] < peaks["lora"]
    assert peaks["mesp-disk"] < peaks["mesp"] < peaks["lora-checkpointing-tiled"]


def test_in_bf16_the_base_is_bf16_and_the_adapter_float32() -> None:
    case = Case("tiny", "bf16", 32, 4)
    base = MODELS["tiny"].build(torch.bfloat16).eval()
    anchor = make_trainee(METHODS["lora"], base, case)
    assert {p.dtype for p in anchor.model.parameters() if p.requires_grad} == {torch.float32}
    reference = Reference.of(base, case, anchor)
    own = reference.error(one_gradient(anchor))
    assert 1e-4 < own < 0.1  # roundings of bfloat16, and no more
    assert reference.limit == pytest.approx(1.5 * own)
    for name in ("mesp", "lora-checkpointing-tiled"):
        trainee = make_trainee(METHODS[name], base, case, like=anchor)
        assert reference.error(one_gradient(trainee)) <= reference.limit
