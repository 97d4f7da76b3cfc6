"""Learning: train the same adapter each way, on the same rows, and judge it on held-out rows.

All methods run with LoRA's best learning rate of three, chosen on the first seed by the held-out loss, so that none is
tuned for itself, or with another of the three where that is asked for. A run whose file is there is never repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.results import Environment, ResultsError
from hf_memeff.benchmarks.sage_methods import LORA, SageMethod, make_model
from hf_memeff.benchmarks.sage_results import LearningResult, learning_key
from hf_memeff.benchmarks.sage_runs import LearningPlan, Run, best_rate
from hf_memeff.benchmarks.sage_text import TokenRow, drawn_batches, in_order, labelled_tokens, prompt_form, read_rows
from hf_memeff.benchmarks.sage_training import Training, held_out_loss, save_adapter
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.memory import measure_peak_memory

BASE = "base"


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
            else:
                self.advance(f"{key}: already there", self.plan.steps)

    def _found(self, key: str) -> LearningResult | None:
        found = self.shelf.find(key)
        if found is not None:
            steps = () if found.method == BASE else ("steps",)
            for name in ("model", "rows_per_step", "longest_row", "rank", "test_rows", *steps):
                if getattr(found, name) != getattr(self.plan, name):
                    raise _other_plan(found, f"{name}={getattr(found, name)}", f"{name}={getattr(self.plan, name)}")
            form = prompt_form(self.tokenizer)
            if found.prompt != form:
                raise _other_plan(found, f"questions in the form {found.prompt!r}", repr(form))
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
            prompt=prompt_form(self.tokenizer),
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


def _other_plan(found: LearningResult, got: str, expected: str) -> ResultsError:
    return ResultsError(
        f"Got the result {found.key} measured with {got}, expected {expected}. "
        "Fix: move its file away, or --output DIR."
    )
