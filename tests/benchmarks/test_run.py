"""Verify first, then measure, write each result as it is there, and never measure twice without need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_memeff.benchmarks import run as module
from hf_memeff.benchmarks.cases import Case
from hf_memeff.benchmarks.journal import Journal
from hf_memeff.benchmarks.methods import METHODS as ALL_METHODS
from hf_memeff.benchmarks.methods import Trainee
from hf_memeff.benchmarks.results import Environment, read_method_results
from hf_memeff.benchmarks.run import Bench

CASE = Case("tiny", "fp32", 24, 2, rounds=2)
METHODS = ("lora", "lora-checkpointing", "mesp")


def never(dtype: torch.dtype) -> None:
    raise AssertionError("no real weights are asked for")


class Counted:
    """A bench on a file, and what it told."""

    def __init__(self, path: Path, force: bool = False, environment: Environment | None = None) -> None:
        self.lines: list[str] = []
        self.done = 0
        journal = Journal(path, environment or Environment.here(), force)
        self.bench = Bench(journal, "cpu", never, say=self.lines.append, advance=self._advance)

    def _advance(self, text: str, steps: int) -> None:
        self.done += steps

    def run(self, case: Case = CASE, methods: tuple[str, ...] = METHODS) -> Counted:
        self.expected = self.bench.steps([case], methods)
        self.bench.run([case], methods)
        return self


def test_a_result_says_all_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "mesp.json"
    counted = Counted(path).run()
    assert counted.bench.failures == []
    assert counted.done == counted.expected == 3 + 2 * 3
    results = {result.method: result for result in read_method_results(path)}
    assert tuple(results) == METHODS
    for result in results.values():
        assert (result.case, result.tokens, result.rank, result.weights) == ("tiny/fp32/24/r2", 24, 2, "random")
        assert result.peak_bytes is not None and result.peak_bytes > 0
        assert result.meter == "cpu profiler"
        assert len(result.step_seconds) == len(result.reference_seconds) == 2
        assert result.gradient_error <= result.gradient_error_limit == 1e-5
        assert result.environment == Environment.here()
    assert results["lora"].gradient_error == 0
    assert results["lora-checkpointing"].step_seconds == results["mesp"].reference_seconds
    assert results["lora-checkpointing"].time_ratio == 1
    assert results["mesp"].peak_bytes < results["lora-checkpointing"].peak_bytes < results["lora"].peak_bytes
    assert (results["lora"].loss_tile_bytes, results["mesp"].loss_tile_bytes) == (None, 2**20)


def test_a_second_run_measures_what_is_missing_only(tmp_path: Path) -> None:
    path = tmp_path / "mesp.json"
    Counted(path).run(methods=("lora", "lora-checkpointing"))
    first = read_method_results(path)
    again = Counted(path).run(methods=("lora", "lora-checkpointing"))
    assert (again.done, again.lines) == (0, ["tiny/fp32/24/r2: already measured"])
    more = Counted(path).run()
    assert more.done == more.expected == 1 + 2 * 2  # mesp's gradients and peak; two rounds with the reference
    assert read_method_results(path)[:2] == first
    assert read_method_results(path)[2].method == "mesp"


def test_missing_rounds_are_timed_without_measuring_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mesp.json"
    Counted(path).run(replace(CASE, rounds=0))
    assert {result.time_ratio for result in read_method_results(path)} == {None}
    monkeypatch.setattr(module, "measure_peak_memory", lambda *args: pytest.fail("measured again"))
    Counted(path).run()
    assert {len(result.step_seconds) for result in read_method_results(path)} == {2}


def test_force_and_another_environment_measure_again(tmp_path: Path) -> None:
    path = tmp_path / "mesp.json"
    case, methods = replace(CASE, rounds=1), ("lora-checkpointing",)
    Counted(path).run(case, methods)
    forced = Counted(path, force=True).run(case, methods)
    assert forced.done == 2
    assert len(read_method_results(path)) == 1
    elsewhere = replace(Environment.here(), cpu="another one")
    assert Counted(path, environment=elsewhere).run(case, methods).done == 2
    assert [result.environment.cpu for result in read_method_results(path)] == ["another one"]


def test_an_interrupted_run_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mesp.json"
    own, calls = module.timed, []

    def third_step_interrupts(step, device, clock):
        calls.append(device)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return own(step, device, clock)

    monkeypatch.setattr(module, "timed", third_step_interrupts)
    with pytest.raises(KeyboardInterrupt):
        Counted(path).run()
    results = read_method_results(path)
    assert [result.method for result in results] == list(METHODS)
    assert {len(result.step_seconds) for result in results} == {1}  # the round that was complete
    monkeypatch.setattr(module, "timed", own)
    first = [result.step_seconds[0] for result in results]
    assert Counted(path).run().done == 3
    again = read_method_results(path)
    assert [result.step_seconds[0] for result in again] == first
    assert {len(result.step_seconds) for result in again} == {2}


def test_a_wrong_gradient_is_reported_and_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module.make_trainee

    def spoilt(method, *args, **kwargs) -> Trainee:
        trainee = own(method, *args, **kwargs)
        if method.name != "mesp":
            return trainee
        step, parameter = trainee.step, next(p for p in trainee.model.parameters() if p.requires_grad)

        def wrong_step() -> None:
            step()
            parameter.grad.mul_(1.5)

        return Trainee(trainee.model, wrong_step, trainee.warm_up)

    monkeypatch.setattr(module, "make_trainee", spoilt)
    path = tmp_path / "mesp.json"
    counted = Counted(path).run()
    (failure,) = counted.bench.failures
    assert "gradient error of" in failure and "from mesp, expected at most 1.0e-05" in failure
    assert [result.method for result in read_method_results(path)] == ["lora", "lora-checkpointing"]
    assert counted.done == counted.expected  # the bar reaches its end all the same


def test_without_named_methods_a_case_has_its_own_or_all(tmp_path: Path) -> None:
    case = replace(CASE, rounds=0, methods=("mesp",))
    counted = Counted(tmp_path / "mesp.json").run(case, methods=())
    assert [result.method for result in read_method_results(tmp_path / "mesp.json")] == ["mesp"]
    every = [name for name, method in ALL_METHODS.items() if not method.gpu_only]
    assert counted.bench.steps([replace(case, methods=())]) == len(every) - 1


def test_nan_is_no_gradient(tmp_path: Path) -> None:
    reference = module.Reference(torch.ones(3), 1e-5)
    assert not reference.error(torch.full((3,), torch.nan)) <= reference.limit


def test_a_case_that_does_not_fit_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda device: 1000)
    counted = Counted(tmp_path / "mesp.json").run()
    assert counted.bench.failures == []
    assert "left out, plain LoRA may need 0.0 GiB" in counted.lines[0]
    assert counted.done == counted.expected
    assert not (tmp_path / "mesp.json").exists()


def test_the_model_is_loaded_once_for_cases_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, loads = module.load_base, []

    def load(shape, dtype, load_real):
        loads.append((shape.name, dtype))
        return own(shape, dtype, load_real)

    monkeypatch.setattr(module, "load_base", load)
    cases = [replace(CASE, tokens=tokens, dtype=dtype, rounds=0) for dtype in ("fp32", "bf16") for tokens in (8, 9)]
    counted = Counted(tmp_path / "mesp.json")
    counted.bench.run(cases, ("lora",))
    assert loads == [("tiny", "fp32"), ("tiny", "bf16")]
    assert len(read_method_results(tmp_path / "mesp.json")) == 4


def test_free_memory_is_that_of_the_system() -> None:
    free = module.available_bytes("cpu")
    assert free is None or 2**20 < free < 2**50
