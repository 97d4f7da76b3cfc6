"""Learning: train the same adapter each way, on the same rows, and judge it on held-out rows.

All methods run with LoRA's best learning rate of three, chosen on the first seed by the held-out loss, so that none is
tuned for itself. A run whose file is there is never repeated.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import get_linear_schedule_with_warmup

from hf_memeff.benchmarks.comparison import timed
from hf_memeff.benchmarks.results import Environment, ResultsError
from hf_memeff.benchmarks.sage_methods import LORA, MESP, NAMES, SageMethod, expand, make_model
from hf_memeff.benchmarks.sage_results import LearningResult, Shelf, learning_key
from hf_memeff.benchmarks.sage_text import (
    DATA_SETS,
    Batch,
    TokenRow,
    drawn_batches,
    in_order,
    labelled_tokens,
    read_rows,
)
from hf_memeff.memory import measure_peak_memory

SEEDS = (0, 1, 2)
BASE = "base"
LEARNING_NAMES = tuple(name for name in NAMES if name != "lora-checkpointing")
"""Methods that learn; checkpointing learns what LoRA learns."""

_FIRST_NAMES, _FIRST_BUDGET = ("sage-gradient", "sage-attention", "sage-random"), 0.25
_WARM_UP_SHARE = 0.1
_LARGEST_GRADIENT_NORM = 1.0
_TENTHS = 10


@dataclass(frozen=True)
class LearningPlan:
    """What every run has in common.

    Attributes:
        model: name of the base model.
        steps: optimizer steps.
        rows_per_step: rows of a step.
        longest_row: most tokens of a row.
        rank: of the adapter.
        test_rows: held-out rows.
        rates: learning rates that LoRA is tried with.
    """

    model: str = "SmolLM2-135M"
    steps: int = 100
    rows_per_step: int = 4
    longest_row: int = 160
    rank: int = 16
    test_rows: int = 64
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        dataset: key of `DATA_SETS`.
        method: how to train.
        seed: of adapter, rows and random choices.
        rate: learning rate; None for LoRA's best.
    """

    dataset: str
    method: SageMethod
    seed: int
    rate: float | None = None

    def key(self, best_rate: float) -> str:
        """Name of its result."""
        rate = best_rate if self.rate is None else self.rate
        return learning_key(self.dataset, self.method, self.seed, rate)


def planned_runs(
    plan: LearningPlan,
    *,
    datasets: Sequence[str] = tuple(DATA_SETS),
    methods: Sequence[str] = (),
    budgets: Sequence[float],
    seeds: Sequence[int] = SEEDS,
) -> list[Run]:
    """The runs that a command line asks for, the most telling first, since they may be interrupted.

    LoRA's rates on the first seed come first whatever is asked for: the others run with the best of them. Then the
    three saliencies that the claim rests on, on one seed and on the others, then the rest.

    Args:
        plan: the learning rates.
        datasets: keys of `DATA_SETS`, one after the other.
        methods: names out of `LEARNING_NAMES`; empty for all.
        budgets: of SAGE.
        seeds: the first one chooses the rate. MeSP's gradients are LoRA's, so that it runs on this one alone.

    Returns:
        The runs, none twice.
    """
    names = [name for name in LEARNING_NAMES if not methods or name in methods]
    wanted = expand([name for name in names if name.startswith("sage-")], budgets)
    first = [m for name in _FIRST_NAMES for m in wanted if m.name == name and m.token_budget == _FIRST_BUDGET]
    rest = [method for method in wanted if method not in first]
    runs: list[Run] = []
    for dataset in datasets:
        runs += [Run(dataset, LORA, seeds[0], rate) for rate in plan.rates]
        runs += [Run(dataset, method, seeds[0]) for method in first]
        # LoRA with a seed is what the share recovered with that seed is taken of, so it is never left out.
        runs += [Run(dataset, LORA, seed) for seed in seeds[1:]]
        runs += [Run(dataset, method, seed) for seed in seeds[1:] for method in first]
        runs += [Run(dataset, MESP, seeds[0])] if MESP.name in names else []
        runs += [Run(dataset, method, seed) for seed in seeds for method in rest]
    return runs


def best_rate(results: Iterable[LearningResult], dataset: str, rates: Sequence[float]) -> float | None:
    """LoRA's learning rate with the lowest held-out loss, on the one seed that all were tried with; None until then."""
    losses: dict[int, dict[float, float]] = {}
    for result in results:
        if result.dataset == dataset and result.method == LORA.name:
            # a run that diverged has no comparable loss
            loss = result.test_loss if math.isfinite(result.test_loss) else math.inf
            losses.setdefault(result.seed, {})[result.learning_rate] = loss
    tried = [losses[seed] for seed in sorted(losses) if set(rates) <= set(losses[seed])]
    return min(rates, key=tried[0].__getitem__) if tried else None


@dataclass
class Learning:
    """The training runs of a model.

    Attributes:
        plan: what they have in common.
        base: the `PreTrainedModel`, without adapter; it stays so.
        tokenizer: its tokenizer.
        data: folder of the data sets.
        shelf: where results go.
        adapters: folder for LoRA's trained adapters.
        environment: what is measured with.
        say: called with lines for the user.
        advance: called with the name of what runs and the number of steps just done.
    """

    plan: LearningPlan
    base: Any
    tokenizer: Any
    data: Path
    shelf: Shelf[LearningResult]
    adapters: Path
    environment: Environment
    say: Callable[[str], object] = print
    advance: Callable[[str, int], object] = lambda text, steps: None
    _rows: dict[tuple[str, str], list[TokenRow]] = field(default_factory=dict)

    def run(self, runs: Sequence[Run]) -> None:
        """Do the runs whose result is not there.

        Raises:
            DataError: a data set is missing.
            ResultsError: a result is there that was measured by another plan.
        """
        for dataset in dict.fromkeys(run.dataset for run in runs):
            if self._found(learning_key(dataset, SageMethod(BASE), 0, 0.0)) is None:
                self._judge_base(dataset)
        for run in runs:
            rate = run.rate if run.rate is not None else best_rate(self.shelf.all(), run.dataset, self.plan.rates)
            if rate is None:
                raise RuntimeError(f"got {run} before LoRA's rates, expected them first: use planned_runs")
            key = run.key(rate)
            found = self._found(key)
            if found is None:
                found = self._train(run, rate, key)
                self.shelf.add(found)
                self.say(f"{key}: test loss {found.test_loss:.4f}, {found.step_seconds:.1f} s a step")
            elif found.learning_rate != rate:
                raise _other_plan(found, f"a learning rate of {found.learning_rate:g}", f"LoRA's best, {rate:g}")
            else:
                self.advance(f"{key}: already there", self.plan.steps)

    def _found(self, key: str) -> LearningResult | None:
        found = self.shelf.find(key)
        if found is not None:
            steps = () if found.method == BASE else ("steps",)
            for name in ("model", "rows_per_step", "longest_row", "rank", "test_rows", *steps):
                if getattr(found, name) != getattr(self.plan, name):
                    raise _other_plan(found, f"{name}={getattr(found, name)}", f"{name}={getattr(self.plan, name)}")
        return found

    def _judge_base(self, dataset: str) -> None:
        self.advance(f"{dataset}: the base model's loss", 0)
        result = self._result(Run(dataset, SageMethod(BASE), 0), 0.0, self.base, steps=0)
        self.shelf.add(result)
        self.say(f"{result.key}: test loss {result.test_loss:.4f}")

    def _train(self, run: Run, rate: float, key: str) -> LearningResult:
        plan = self.plan
        self.advance(key, 0)
        model = make_model(run.method, self.base, rank=plan.rank, seed=run.seed)
        rows = self._read(run.dataset, "train")
        batches = drawn_batches(rows, self.tokenizer.pad_token_id, run.seed, plan.steps, plan.rows_per_step)
        training = Training(model, rate, plan.steps)
        for batch in batches:
            training.step(batch)
            self.advance(key, 1)
        longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
        peak = measure_peak_memory(partial(training.gradients, longest), "cpu")
        if run.method == LORA:  # before the result, which says that the run is complete
            save_adapter(model, self.adapters / f"{key}.safetensors")
        return self._result(
            run,
            rate,
            model,
            steps=plan.steps,
            train_losses=training.tenths(),
            step_seconds=statistics.median(training.seconds),
            step_cpu_seconds=statistics.median(training.cpu_seconds),
            peak_bytes=peak.peak_bytes,
            meter=peak.meter,
        )

    def _result(self, run: Run, rate: float, model: Any, **measured: Any) -> LearningResult:
        tests = self._read(run.dataset, "test")
        batches = in_order(tests, self.tokenizer.pad_token_id, self.plan.rows_per_step)
        unmeasured = {"train_losses": (), "step_seconds": None, "step_cpu_seconds": None, "peak_bytes": None}
        return LearningResult(
            dataset=run.dataset,
            model=self.plan.model,
            method=run.method.name,
            token_budget=run.method.token_budget,
            seed=run.seed,
            learning_rate=rate,
            rank=self.plan.rank,
            rows_per_step=self.plan.rows_per_step,
            longest_row=self.plan.longest_row,
            test_rows=len(tests),
            test_tokens=sum(map(labelled_tokens, batches)),
            test_loss=held_out_loss(model, batches),
            environment=self.environment,
            **unmeasured | {"meter": "none"} | measured,
        )

    def _read(self, dataset: str, split: str) -> list[TokenRow]:
        if (dataset, split) not in self._rows:
            count = self.plan.test_rows if split == "test" else None
            rows = read_rows(self.data, dataset, split, self.tokenizer, self.plan.longest_row, count)
            self._rows[dataset, split] = rows
        return self._rows[dataset, split]


class Training:
    """AdamW without weight decay, linear warm-up and decay, gradients clipped at norm 1: Trainer's defaults.

    Args:
        model: a `PeftModel` in train mode.
        rate: highest learning rate.
        steps: optimizer steps of the schedule.

    Attributes:
        losses: one per step.
        seconds: wall time of each step.
        cpu_seconds: CPU time of this process in each step.
    """

    def __init__(self, model: Any, rate: float, steps: int) -> None:
        self.model = model
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)  # allocated before the meter starts
        self._optimizer = torch.optim.AdamW(self._parameters, lr=rate, weight_decay=0.0)
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, round(_WARM_UP_SHARE * steps), steps)

    def step(self, batch: Batch) -> None:
        """One optimizer step."""
        cpu = time.process_time()
        self.seconds.append(timed(partial(self._update, batch), "cpu"))
        self.cpu_seconds.append(time.process_time() - cpu)

    def gradients(self, batch: Batch) -> float:
        """Forward and backward; returns the loss."""
        for parameter in self._parameters:
            parameter.grad.zero_()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    def tenths(self) -> tuple[float, ...]:
        """Mean loss of each tenth of the steps so far."""
        size = max(1, len(self.losses) // _TENTHS)
        return tuple(statistics.fmean(self.losses[i : i + size]) for i in range(0, len(self.losses), size))

    def _update(self, batch: Batch) -> None:
        self.losses.append(self.gradients(batch))
        nn.utils.clip_grad_norm_(self._parameters, _LARGEST_GRADIENT_NORM)
        self._optimizer.step()
        self._schedule.step()


@torch.no_grad()
def held_out_loss(model: Any, batches: Sequence[Batch]) -> float:
    """Mean cross-entropy per labelled token over all batches, in eval mode; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        counts = [labelled_tokens(batch) for batch in batches]
        losses = [model(**batch, use_cache=False).loss.item() for batch in batches]
    finally:
        model.train(training)
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def save_adapter(model: nn.Module, path: Path) -> None:
    """Write the trained values; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        save_file(values, Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)


def load_adapter(model: nn.Module, path: Path) -> None:
    """Give a model what `save_adapter` wrote of one with the same adapter."""
    values = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values[name])


def _other_plan(found: LearningResult, got: str, expected: str) -> ResultsError:
    return ResultsError(
        f"Got the result {found.key} measured with {got}, expected {expected}. "
        "Fix: move its file away, or --output DIR."
    )
