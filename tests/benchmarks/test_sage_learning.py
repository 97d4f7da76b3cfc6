"""What a run measures, and that a finished one is never repeated."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks import sage_learning as module
from hf_memeff.benchmarks.results import Environment, ResultsError
from hf_memeff.benchmarks.sage_learning import Learning
from hf_memeff.benchmarks.sage_methods import SageMethod, make_model
from hf_memeff.benchmarks.sage_results import LearningResult
from hf_memeff.benchmarks.sage_runs import LEARNING_NAMES, LearningPlan, Run, best_rate, planned_runs
from hf_memeff.benchmarks.sage_text import in_order, read_rows
from hf_memeff.benchmarks.sage_training import Training, held_out_loss, load_adapter
from hf_memeff.benchmarks.shelf import Shelf

PLAN = LearningPlan(model="tiny", steps=12, rank=4, test_rows=8, rates=(1e-3, 1e-2))


def learning(folder: Path, data: Path, base: Any, tokenizer: Any, plan: LearningPlan = PLAN) -> Learning:
    shelf = Shelf(LearningResult, folder / "learning")
    return Learning(plan, base, tokenizer, data, shelf, folder / "adapters", Environment.here(), lambda text: None)


def runs_of(*methods: str, seeds: tuple[int, ...] = (0,), plan: LearningPlan = PLAN) -> list[Run]:
    return planned_runs(plan, datasets=["gsm8k"], methods=methods, budgets=[0.25], seeds=seeds)


def test_every_method_learns_and_its_figures_are_there(data: Path, base: Any, tokenizer: Any, tmp_path: Path) -> None:
    bench = learning(tmp_path, data, base, tokenizer)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    steps: list[int] = []
    bench.advance = lambda text, done: steps.append(done)
    runs = runs_of()
    bench.run(runs)
    assert sum(steps) == len(runs) * PLAN.steps
    results = {result.key: result for result in bench.shelf.all()}
    untrained = results.pop("gsm8k-base-seed0")
    assert (untrained.steps, untrained.step_seconds, untrained.peak_bytes) == (0, None, None)
    assert {result.method for result in results.values()} == set(LEARNING_NAMES)
    assert len(results) == len(runs)
    for result in results.values():
        assert result.test_loss < untrained.test_loss
        assert result.peak_bytes > 0 and result.step_seconds > 0 and result.step_cpu_seconds > 0
        assert len(result.train_losses) == 12 and result.train_losses[-1] < result.train_losses[0]
        assert (result.test_rows, result.test_tokens) == (8, untrained.test_tokens)
    best = best_rate(results.values(), "gsm8k", PLAN.rates)
    assert {r.learning_rate for r in results.values() if r.method != "lora"} == {best}
    assert results[f"gsm8k-mesp-lr{best:g}-seed0"].test_loss == pytest.approx(
        results[f"gsm8k-lora-lr{best:g}-seed0"].test_loss, rel=1e-5
    )
    assert len({result.test_loss for result in results.values()}) >= len(results) - 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_a_finished_run_is_never_repeated(
    data: Path, base: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning(tmp_path, data, base, tokenizer).run(runs_of("sage-random"))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "learning").iterdir()}
    monkeypatch.setattr(Training, "step", lambda *args: pytest.fail("run again"))
    monkeypatch.setattr(module, "held_out_loss", lambda *args: pytest.fail("judged again"))
    again = learning(tmp_path, data, base, tokenizer)
    done: list[int] = []
    again.advance = lambda text, steps: done.append(steps)
    again.run(runs_of("sage-random"))
    assert sum(done) == 3 * PLAN.steps
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "learning").iterdir()} == files


def test_an_interrupted_run_leaves_nothing_and_is_run_the_next_time(
    data: Path, base: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = Training.step, []

    def interrupt(self: Training, batch: Any) -> None:
        calls.append(batch)
        if len(calls) == PLAN.steps + 5:
            raise KeyboardInterrupt
        own(self, batch)

    monkeypatch.setattr(Training, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learning(tmp_path, data, base, tokenizer).run(runs_of("lora"))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "gsm8k-base-seed0.json",
        "gsm8k-lora-lr0.001-seed0.json",
        "gsm8k-lora-lr0.001-seed0.safetensors",
    ]
    learning(tmp_path, data, base, tokenizer).run(runs_of("lora"))
    assert len(calls) == PLAN.steps + 5 + PLAN.steps
    assert (tmp_path / "learning" / "gsm8k-lora-lr0.01-seed0.json").exists()


def test_a_result_of_another_plan_is_refused(data: Path, base: Any, tokenizer: Any, tmp_path: Path) -> None:
    short = replace(PLAN, steps=2)
    learning(tmp_path, data, base, tokenizer, short).run(runs_of("lora", plan=short))
    with pytest.raises(ResultsError, match=r"measured with steps=2, expected steps=12.*--output DIR"):
        learning(tmp_path, data, base, tokenizer).run(runs_of("lora"))
    chat = copy.copy(tokenizer)
    chat.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ResultsError, match="questions in the form 'line', expected 'chat'"):
        learning(tmp_path, data, base, chat, short).run(runs_of("lora", plan=short))
    other = replace(short, rates=(1e-3, 1e-2, 3e-2))
    learning(tmp_path, data, base, tokenizer, short).run(runs_of("sage-random", plan=short))
    bench = learning(tmp_path, data, base, tokenizer, other)
    bench.run(runs_of("lora", plan=other))
    bench.shelf.add(replace(bench.shelf.find("gsm8k-lora-lr0.03-seed0"), test_loss=0.0))
    bench.run(runs_of("sage-random", plan=other))  # with LoRA's best of now; the earlier one's result stays
    random = sorted(r.learning_rate for r in bench.shelf.all() if r.method == "sage-random")
    assert random == [1e-2, 3e-2]


def test_the_trained_adapter_comes_back(data: Path, base: Any, tokenizer: Any, tmp_path: Path) -> None:
    bench = learning(tmp_path, data, base, tokenizer)
    bench.run(runs_of("lora"))
    model = make_model(SageMethod("sage-gradient", 0.5), base, rank=PLAN.rank, seed=9)
    batches = in_order(read_rows(data, "gsm8k", "test", tokenizer, PLAN.longest_row, PLAN.test_rows), 0, 4)
    assert held_out_loss(model, batches) > bench.shelf.find("gsm8k-lora-lr0.01-seed0").test_loss + 0.01
    load_adapter(model, tmp_path / "adapters" / "gsm8k-lora-lr0.01-seed0.safetensors")
    assert model.training
    expected = bench.shelf.find("gsm8k-lora-lr0.01-seed0").test_loss
    assert held_out_loss(model, batches) == pytest.approx(expected, rel=1e-6)
