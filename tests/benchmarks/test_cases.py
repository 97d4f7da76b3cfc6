"""Which cases there are, and that their models are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_memeff.benchmarks.cases import DEFAULT_CASES, MODELS, QUICK_CASES, Case, load_base, select_cases
from hf_memeff.benchmarks.methods import METHODS, make_trainee
from hf_memeff.blocks import causal_loss
from hf_memeff.memory import measure_peak_memory

TINY = Case("tiny", "fp32", 48, 4)


def test_the_default_cases_span_what_the_benchmark_promises() -> None:
    smol = [case for case in DEFAULT_CASES if case.model == "SmolLM2-135M"]
    assert {case.tokens for case in smol if case.rank == 8} == {128, 256, 512, 1024, 2048}
    assert {case.rank for case in smol} == {4, 8, 16, 32}
    assert {case.dtype for case in smol} == {"fp32", "bf16"}
    assert {case.model for case in DEFAULT_CASES} == {"SmolLM2-135M", "Qwen2.5-0.5B", "Qwen2.5-1.5B"}
    assert len({case.key for case in DEFAULT_CASES}) == len(DEFAULT_CASES)
    assert all(case.methods == () for case in smol if case.dtype == "fp32" and case.rank == 8 and case.tokens <= 1024)
    assert {method for case in DEFAULT_CASES for method in case.methods} <= set(METHODS)


def test_options_give_every_combination() -> None:
    cases = select_cases(models=["tiny", "Qwen2.5-0.5B"], lengths=[8, 16], ranks=[4, 8], dtypes=["bf16", "fp32"])
    assert len(cases) == len({case.key for case in cases}) == 16
    assert [(case.model, case.dtype) for case in cases] == [
        (model, dtype) for model in ("Qwen2.5-0.5B", "tiny") for dtype in ("fp32", "bf16") for _ in range(4)
    ]  # so that each model is loaded once
    assert select_cases(lengths=[64]) == [Case("SmolLM2-135M", "fp32", 64, 8)]


def test_quick_and_rounds() -> None:
    assert select_cases(quick=True) == list(QUICK_CASES)
    assert {case.rounds for case in select_cases(rounds=1)} == {1}
    assert len(select_cases()) == len(DEFAULT_CASES)


def test_parameters_are_counted_right() -> None:
    shape = MODELS["tiny"]
    weights = sum(p.numel() for name, p in shape.build(torch.float32).named_parameters() if name.endswith("weight"))
    norms = (2 * shape.layers + 1) * shape.hidden_size
    assert weights - norms == shape.parameters
    assert MODELS["Qwen2.5-0.5B"].parameters == pytest.approx(0.494e9, rel=0.01)
    assert MODELS["Qwen2.5-1.5B"].parameters == pytest.approx(1.54e9, rel=0.01)
    assert MODELS["SmolLM2-135M"].parameters == pytest.approx(0.1345e9, rel=0.01)


def test_real_weights_come_from_the_loader_and_random_ones_are_seeded() -> None:
    base = MODELS["tiny"].build(torch.float32)
    asked = []

    def load(dtype: torch.dtype) -> torch.nn.Module:
        asked.append(dtype)
        return base

    assert load_base(replace(MODELS["tiny"], weights="real"), "bf16", load) is base
    assert asked == [torch.bfloat16]
    again = load_base(MODELS["tiny"], "fp32", load)
    assert not again.training
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), again.parameters(), strict=True))


def test_the_estimate_of_memory_is_not_below_what_plain_lora_takes() -> None:
    base = MODELS["tiny"].build(torch.float32)
    trainee = make_trainee(METHODS["lora"], base, TINY)
    peak = measure_peak_memory(trainee.step, "cpu").peak_bytes
    assert peak is not None
    assert peak <= TINY.needed_bytes - 4 * TINY.shape.parameters <= 4 * peak


def test_baselines_get_the_tile_that_mesp_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    own = causal_loss.linear_cross_entropy

    def spy(*args, **kwargs):
        seen.append(kwargs["tile_bytes"])
        return own(*args, **kwargs)

    trainee = make_trainee(METHODS["mesp"], MODELS["tiny"].build(torch.float32), replace(TINY, tokens=2000))
    trainee.step()  # the first step also checks the head, on a few rows
    monkeypatch.setattr(causal_loss, "linear_cross_entropy", spy)
    trainee.step()
    assert seen == [replace(TINY, tokens=2000).loss_tile_bytes] == [4 * 2000 * 64 * 4]
