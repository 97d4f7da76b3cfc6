"""Which runs are done in which order, and the choice of LoRA's learning rate."""

from __future__ import annotations

import math
from dataclasses import replace

from hf_memeff.benchmarks.sage_methods import BUDGETS
from hf_memeff.benchmarks.sage_runs import LearningPlan, best_rate, planned_runs


def test_the_full_matrix_starts_with_the_runs_that_tell_most() -> None:
    runs = planned_runs(LearningPlan(), budgets=BUDGETS)
    assert len(runs) == len(set(runs)) == 2 * (3 + 2 + 1 + 3 * 4 * 3)
    assert [run.dataset for run in runs] == ["gsm8k"] * 42 + ["boolq"] * 42
    told = [(r.method.name, r.method.token_budget, r.seed, r.rate) for r in runs[:15]]
    first = ["sage-gradient", "sage-attention", "sage-random"]
    assert told == [
        *(("lora", None, 0, rate) for rate in (3e-4, 1e-3, 3e-3)),
        *((name, 0.25, 0, None) for name in first),
        ("lora", None, 1, None),
        ("lora", None, 2, None),
        *((name, 0.25, seed, None) for seed in (1, 2) for name in first),
        ("mesp", None, 0, None),
    ]


def test_what_is_not_asked_for_is_not_run_but_lora_always() -> None:
    plan = LearningPlan()
    runs = planned_runs(plan, datasets=["gsm8k"], methods=["sage-random"], budgets=[0.25], seeds=[4, 5])
    told = {(r.method.name, r.method.token_budget, r.seed) for r in runs}
    assert told == {("lora", None, 4), ("lora", None, 5), ("sage-random", 0.25, 4), ("sage-random", 0.25, 5)}


def test_a_rate_that_is_asked_for_is_lora_s_too() -> None:
    runs = planned_runs(
        LearningPlan(), datasets=["gsm8k"], methods=["sage-random"], budgets=[0.25], seeds=[4, 5], rates=[1e-3]
    )
    told = [(r.method.name, r.seed, r.rate) for r in runs]
    chosen = [("lora", 4, rate) for rate in (3e-4, 1e-3, 3e-3)]
    assert told == [*chosen, ("sage-random", 4, 1e-3), ("lora", 5, 1e-3), ("sage-random", 5, 1e-3)]


def test_the_best_rate_needs_all_and_skips_what_diverged(learning) -> None:
    rates = (3e-4, 1e-3)
    slow, fast = (r for r in learning if r.method == "lora" and r.seed == 0)
    assert best_rate([slow, fast], "gsm8k", rates) == 1e-3
    assert best_rate([slow, replace(fast, test_loss=math.nan)], "gsm8k", rates) == 3e-4
    assert best_rate([slow], "gsm8k", rates) is None
    assert best_rate([slow, fast], "boolq", rates) is None
    for seed in (-1, 1):  # a seed that one rate was run with chooses nothing
        assert best_rate([slow, fast, replace(slow, seed=seed, test_loss=0.5)], "gsm8k", rates) == 1e-3
