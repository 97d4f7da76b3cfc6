"""Models that share weights and adapters differ only in how they train; figures are per method and paired."""

from __future__ import annotations

import time

import pytest
import torch
from peft import LoraConfig
from torch import nn

from helpers import tiny_model
from hf_memeff import MespConfig, SageConfig
from hf_memeff.benchmarks.comparison import (
    METHODS,
    PROCESS,
    WALL,
    compare,
    fill_adapters,
    paired_ratio,
    steady_clock,
    timed,
    with_shared_weights,
    wrap,
)

FIELDS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def _models(fill: bool = True, **fields: object) -> dict[str, nn.Module]:
    base = tiny_model()
    models = {method: wrap(with_shared_weights(base), method, **{**FIELDS, **fields}) for method in METHODS}
    if fill:
        fill_adapters(list(models.values()))
    return models


def _adapter(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _step(model: nn.Module) -> None:
    ids = torch.arange(3, 67)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def test_copies_share_every_weight_and_no_adapter() -> None:
    base = tiny_model()
    tensors = {t.data_ptr() for t in [*base.parameters(), *base.buffers()]}
    copy = with_shared_weights(base)
    assert copy is not base
    assert {t.data_ptr() for t in [*copy.parameters(), *copy.buffers()]} == tensors
    first, second = wrap(copy, "lora", **FIELDS), wrap(with_shared_weights(base), "lora", **FIELDS)
    assert not any("lora" in name for name, _ in base.named_parameters())
    for name, parameter in _adapter(first).items():
        assert parameter.data_ptr() != _adapter(second)[name].data_ptr()


def test_the_methods_are_what_they_are_called() -> None:
    models = _models()
    assert {name: type(model.peft_config["default"]) for name, model in models.items()} == {
        "lora": LoraConfig,
        "lora-checkpointing": LoraConfig,
        "mesp": MespConfig,
        "sage": SageConfig,
    }
    calls = dict.fromkeys(models, 0)
    for name, model in models.items():
        layer = model.get_base_model().model.layers[0].mlp

        def count(*args: object, name: str = name) -> None:
            calls[name] += 1

        layer.act_fn.register_forward_hook(count)
        _step(model)
    assert calls["lora"] == 1
    assert calls["lora-checkpointing"] == 2


def test_the_same_seed_gives_the_same_adapter_and_another_another() -> None:
    values = [_adapter(wrap(tiny_model(), method, seed=seed, **FIELDS)) for method, seed in
              (("lora", 3), ("mesp", 3), ("lora", 4))]  # fmt: skip
    same = [torch.equal(values[0][name], values[1][name]) for name in values[0]]
    other = [torch.equal(values[0][name], values[2][name]) for name in values[0] if "lora_A" in name]
    assert all(same)
    assert not any(other)


def test_filled_adapters_are_equal_and_b_is_not_zero() -> None:
    adapters = [_adapter(model) for model in _models().values()]
    for name, parameter in adapters[0].items():
        assert all(torch.equal(parameter, adapter[name]) for adapter in adapters[1:])
        assert parameter.abs().max() > 0


def test_compare_measures_peak_time_and_exactness() -> None:
    steps = []
    figures = compare(_models(), _step, reference="lora", rounds=3, after_step=lambda: steps.append(1))
    assert [entry.method for entry in figures] == list(METHODS)
    assert len(steps) == len(METHODS) * 4
    assert all(len(entry.step_seconds) == 3 and min(entry.step_seconds) > 0 for entry in figures)
    assert figures[0].time_ratio == 1
    peaks = [entry.peak_bytes or 0 for entry in figures]
    assert peaks[0] > peaks[1] > peaks[2] > 0
    assert all(entry.gradient_error <= 1e-5 for entry in figures[:3])
    assert [entry.gradient_cosine for entry in figures[:3]] == pytest.approx([1.0] * 3)
    assert figures[3].gradient_error > 1e-2 and 0.2 < figures[3].gradient_cosine < 0.999


def test_compare_sees_a_wrong_gradient() -> None:
    models = _models()
    with torch.no_grad():
        next(p for name, p in models["mesp"].named_parameters() if "lora_A" in name).mul_(1.01)
    figures = {entry.method: entry for entry in compare(models, _step, reference="lora", rounds=1)}
    assert figures["mesp"].gradient_error > 1e-4
    assert figures["lora-checkpointing"].gradient_error < 1e-6


def test_no_round_starts_after_the_deadline_but_the_first() -> None:
    figures = compare(_models(), _step, reference="lora", rounds=50, deadline=time.monotonic() - 1)
    assert {len(entry.step_seconds) for entry in figures} == {1}


def test_the_order_rotates() -> None:
    order: list[str] = []
    modules = {name: nn.Linear(1, 1) for name in "abc"}

    def step(module: nn.Module) -> None:
        order.append(next(name for name, other in modules.items() if other is module))
        module(torch.ones(1, 1)).sum().backward()

    compare(modules, step, reference="a", rounds=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_paired_ratio_is_the_median_of_ratios() -> None:
    assert paired_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def test_timed_measures_the_call() -> None:
    assert 0.05 <= timed(lambda: time.sleep(0.05), "cpu") < 5


@pytest.mark.parametrize(
    ("change", "message"), [({"rounds": 0}, "rounds=0, expected at least 1"), ({"reference": "x"}, "expected one of a")]
)
def test_bad_arguments_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare({"a": nn.Linear(1, 1)}, lambda model: None, **{"reference": "a", "rounds": 1, **change})


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of lora, lora-checkpointing, mesp"):
        wrap(tiny_model(), "mezo", **FIELDS)


def test_one_thread_is_timed_by_the_work_it_does() -> None:
    """Another process on the same core must not look like a slow method."""
    assert torch.get_num_threads() == 1 and steady_clock("cpu") == PROCESS
    assert timed(lambda: time.sleep(0.2), "cpu", PROCESS) < 0.1
    assert timed(lambda: time.sleep(0.2), "cpu") >= 0.2
    torch.set_num_threads(2)
    try:
        assert steady_clock("cpu") == WALL
    finally:
        torch.set_num_threads(1)
