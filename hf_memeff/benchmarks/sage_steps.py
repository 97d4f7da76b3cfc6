"""Steps: peak memory, cached bytes and paired time of one step on rows of real text, every token a label."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_memeff.benchmarks.cases import SEED, Case
from hf_memeff.benchmarks.comparison import fill_adapters, timed
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.run import available_bytes
from hf_memeff.benchmarks.sage_methods import LORA, MESP, SageMethod, expand, make_model
from hf_memeff.benchmarks.sage_results import StepResult, method_key, step_key
from hf_memeff.benchmarks.sage_text import DataError, read_texts
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.memory import measure_peak_memory, saved_tensor_bytes

CHECKPOINTING = SageMethod("lora-checkpointing")
STEP_NAMES = ("sage-attention", "sage-gradient")
"""SAGE's saliencies that are measured; the others cost what "attention" does, or less."""

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class StepPlan:
    """What every step has in common.

    Attributes:
        dataset: key of `DATA_SETS`.
        model: name of the base model, a key of `MODELS`.
        rows: rows of the step.
        tokens: tokens of each.
        rank: of the adapter, whose B is random, since half of the gradient is zero at B = 0.
        rounds: timed rounds.
    """

    dataset: str = "gsm8k"
    model: str = "SmolLM2-135M"
    rows: int = 4
    tokens: int = 512
    rank: int = 16
    rounds: int = 5

    @property
    def needed_bytes(self) -> int:
        """Upper estimate of the memory for plain LoRA."""
        return Case(self.model, "fp32", self.rows * self.tokens, self.rank).needed_bytes


def planned_steps(budgets: Sequence[float]) -> list[SageMethod]:
    """LoRA without and with checkpointing, MeSP, and SAGE with each budget."""
    return [LORA, CHECKPOINTING, MESP, *expand(STEP_NAMES, budgets)]


def read_ids(folder: Path, dataset: str, tokenizer: Any, rows: int, tokens: int) -> Tensor:
    """(B, S) ids of a data set's training rows, questions and answers, one after the other.

    Raises:
        DataError: there is less text.
    """
    ids: list[int] = []
    for question, answer in read_texts(folder, dataset, "train"):
        ids += tokenizer(f"{question}\n{answer}\n\n", add_special_tokens=False).input_ids
        if len(ids) >= rows * tokens:
            return torch.tensor(ids[: rows * tokens]).view(rows, tokens)
    raise DataError(f"Got {len(ids)} tokens of {dataset}, expected {rows * tokens}. Fix: use the whole published file.")


@dataclass
class Steps:
    """The steps of a model.

    Attributes:
        plan: what they have in common.
        base: the `PreTrainedModel`, without adapter; it stays so.
        ids: (B, S) token ids, inputs and labels.
        shelf: where results go.
        environment: what is measured with; results of another one are measured again, since times are compared.
        say: called with lines for the user.
        advance: called with the name of what runs and the number of steps just done.
    """

    plan: StepPlan
    base: Any
    ids: Tensor
    shelf: Shelf[StepResult]
    environment: Environment
    say: Callable[[str], object] = print
    advance: Callable[[str, int], object] = lambda text, steps: None

    def run(self, methods: Sequence[SageMethod]) -> None:
        """Measure the methods whose result is not there, or has too few rounds.

        Each round is written as it is complete. If plain LoRA may not fit into memory, nothing is measured, which is
        said.
        """
        todo = self._todo(methods)
        available = available_bytes("cpu")
        if todo and available is not None and self.plan.needed_bytes > available:
            self.say(
                f"steps left out, plain LoRA may need {self.plan.needed_bytes / 2**30:.1f} GiB and "
                f"{available / 2**30:.1f} GiB are free"
            )
            todo = []
        if not todo:
            return
        models = {
            method: make_model(method, self.base, rank=self.plan.rank, seed=SEED)
            for method in dict.fromkeys((LORA, CHECKPOINTING, *todo))
        }
        fill_adapters(list(models.values()))
        for method, model in models.items():
            self._prepare(model)
            if method in todo and self._found(method) is None:
                self._measure_memory(method, model)
        for index in range(max(map(self._missing_rounds, todo))):
            self._time(models, todo, index)

    def steps(self, methods: Sequence[SageMethod]) -> int:
        """How many steps `run` will report to `advance`."""
        todo = self._todo(methods)
        if not todo:
            return 0
        untested = sum(self._found(method) is None for method in todo)
        return untested + max(map(self._missing_rounds, todo)) * len({LORA, CHECKPOINTING, *todo})

    def _found(self, method: SageMethod) -> StepResult | None:
        found = self.shelf.find(step_key(self.plan.dataset, self.plan.rows, self.plan.tokens, method))
        if found is None or (found.model, found.rank) != (self.plan.model, self.plan.rank):
            return None
        return found if found.environment.comparable(self.environment) else None

    def _todo(self, methods: Sequence[SageMethod]) -> list[SageMethod]:
        return [method for method in methods if self._found(method) is None or self._missing_rounds(method) > 0]

    def _missing_rounds(self, method: SageMethod) -> int:
        found = self._found(method)
        return self.plan.rounds - (len(found.step_seconds) if found else 0)

    def _prepare(self, model: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # allocated before the meter starts
        self._step(model, self.ids[:, :_WARM_UP_TOKENS])  # what a model does only once

    def _forward(self, model: Any, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def _step(self, model: Any, ids: Tensor) -> None:
        self._forward(model, ids).backward()

    def _measure_memory(self, method: SageMethod, model: Any) -> None:
        self.advance(f"{method_key(method)}: memory", 0)
        cached = None
        if method != CHECKPOINTING:
            cached = saved_tensor_bytes(partial(self._forward, model, self.ids), exclude=model)
        peak = measure_peak_memory(partial(self._step, model, self.ids), "cpu")
        self.shelf.add(
            StepResult(
                dataset=self.plan.dataset,
                model=self.plan.model,
                method=method.name,
                token_budget=method.token_budget,
                rows=self.plan.rows,
                tokens=self.plan.tokens,
                rank=self.plan.rank,
                peak_bytes=peak.peak_bytes,
                meter=peak.meter,
                cached_bytes=cached,
                step_seconds=(),
                step_cpu_seconds=(),
                lora_seconds=(),
                lora_cpu_seconds=(),
                checkpointing_seconds=(),
                checkpointing_cpu_seconds=(),
                environment=self.environment,
            )
        )
        self.advance(method_key(method), 1)

    def _time(self, models: dict[SageMethod, Any], todo: Sequence[SageMethod], index: int) -> None:
        """One round, in an order that rotates, so that none always runs first."""
        order = list(models)
        turn = index % len(order)
        wall: dict[SageMethod, float] = {}
        cpu: dict[SageMethod, float] = {}
        for method in order[turn:] + order[:turn]:
            self.advance(f"{method_key(method)}: time", 0)
            before = time.process_time()
            wall[method] = timed(partial(self._step, models[method], self.ids), "cpu")
            cpu[method] = time.process_time() - before
            self.advance(method_key(method), 1)
        for method in todo:
            found = self._found(method)
            if found is not None and len(found.step_seconds) < self.plan.rounds:
                self.shelf.add(
                    replace(
                        found,
                        step_seconds=(*found.step_seconds, wall[method]),
                        step_cpu_seconds=(*found.step_cpu_seconds, cpu[method]),
                        lora_seconds=(*found.lora_seconds, wall[LORA]),
                        lora_cpu_seconds=(*found.lora_cpu_seconds, cpu[LORA]),
                        checkpointing_seconds=(*found.checkpointing_seconds, wall[CHECKPOINTING]),
                        checkpointing_cpu_seconds=(*found.checkpointing_cpu_seconds, cpu[CHECKPOINTING]),
                    )
                )
