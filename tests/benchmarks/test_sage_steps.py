"""A step's memory and paired times: what they are of, and that rounds add up and survive an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks import sage_steps as module
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_methods import LORA, MESP, SageMethod
from hf_memeff.benchmarks.sage_results import StepResult
from hf_memeff.benchmarks.sage_steps import CHECKPOINTING, StepPlan, Steps, planned_steps, read_ids
from hf_memeff.benchmarks.sage_text import DataError
from hf_memeff.benchmarks.shelf import Shelf

PLAN = StepPlan(model="tiny", rows=2, tokens=64, rank=2, rounds=2)
SAGE = SageMethod("sage-attention", 0.25)


def steps(folder: Path, base: Any, plan: StepPlan = PLAN, environment: Environment | None = None) -> Steps:
    ids = torch.randint(257, (plan.rows, plan.tokens), generator=torch.Generator().manual_seed(0))
    return Steps(plan, base, ids, Shelf(StepResult, folder), environment or Environment.here(), lambda text: None)


def test_the_methods_of_a_command_line() -> None:
    names = [(method.name, method.token_budget) for method in planned_steps([0.25, 0.5])]
    assert names[:3] == [("lora", None), ("lora-checkpointing", None), ("mesp", None)]
    assert names[3:] == [(f"sage-{s}", b) for s in ("attention", "gradient") for b in (0.25, 0.5)]


def test_a_result_says_all_that_was_measured(base: Any, tmp_path: Path) -> None:
    bench, methods = steps(tmp_path, base), planned_steps([0.25])
    done: list[int] = []
    bench.advance = lambda text, count: done.append(count)
    expected = bench.steps(methods)
    bench.run(methods)
    assert sum(done) == expected == 5 + 2 * 5
    found = {(r.method, r.token_budget): r for r in bench.shelf.all()}
    assert set(found) == {(method.name, method.token_budget) for method in methods}
    for result in found.values():
        assert result.peak_bytes > 0
        assert len(result.step_seconds) == len(result.step_cpu_seconds) == 2
        assert result.lora_seconds == found["lora", None].step_seconds
        assert result.checkpointing_cpu_seconds == found["lora-checkpointing", None].step_cpu_seconds
    cached = {name: result.cached_bytes for (name, _), result in found.items()}
    assert cached.pop("lora-checkpointing") is None
    assert cached["sage-attention"] < cached["mesp"] < cached["lora"]
    assert bench.steps(methods) == 0


def test_rounds_that_are_missing_are_added_without_measuring_memory_again(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path, base, replace(PLAN, rounds=1)).run([MESP])
    first = Shelf(StepResult, tmp_path).all()
    assert [result.method for result in first] == ["mesp"]
    monkeypatch.setattr(module, "measure_peak_memory", lambda *args: pytest.fail("measured again"))
    steps(tmp_path, base).run([MESP])
    (second,) = Shelf(StepResult, tmp_path).all()
    assert second.step_seconds[0] == first[0].step_seconds[0] and len(second.step_seconds) == 2
    monkeypatch.setattr(module, "make_model", lambda *args, **kwargs: pytest.fail("built again"))
    steps(tmp_path, base).run([MESP])
    assert steps(tmp_path, base, replace(PLAN, dataset="boolq")).steps([MESP]) == 1 + 2 * 3  # other text, other step


def test_an_interruption_keeps_complete_rounds(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = module.timed, []

    def interrupt(step: Any, device: str) -> float:
        calls.append(device)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return own(step, device)

    monkeypatch.setattr(module, "timed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps(tmp_path, base).run([LORA, CHECKPOINTING, SAGE])
    assert {len(result.step_seconds) for result in Shelf(StepResult, tmp_path).all()} == {1}


def test_another_machine_s_times_are_measured_again(base: Any, tmp_path: Path) -> None:
    steps(tmp_path, base).run([MESP])
    elsewhere = replace(Environment.here(), cpu="another one")
    bench = steps(tmp_path, base, environment=elsewhere)
    assert bench.steps([MESP]) == 1 + 2 * 3
    bench.run([MESP])
    assert [result.environment.cpu for result in bench.shelf.all()] == ["another one"]


def test_what_does_not_fit_is_left_out_and_said(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda device: 1000)
    bench, lines = steps(tmp_path, base), []
    bench.say = lines.append
    bench.run([MESP])
    assert "steps left out, plain LoRA may need 0.0 GiB" in lines[0]
    assert bench.shelf.all() == []


def test_ids_are_the_rows_one_after_the_other(data: Path, tokenizer: Any) -> None:
    ids = read_ids(data, "gsm8k", tokenizer, 2, 30)
    assert ids.shape == (2, 30)
    assert tokenizer.decode(ids.flatten()).startswith("What is 0 + 0?\n#### 0\n\nWhat is 1 + 3? Think.\n#### 4\n\n")
    with pytest.raises(DataError, match="tokens of gsm8k, expected 100000"):
        read_ids(data, "gsm8k", tokenizer, 100, 1000)
