"""Gradients: the cosine of SAGE's gradient to the exact one, whole and by block."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.benchmarks.cases import SEED
from hf_memeff.benchmarks.comparison import fill_adapters
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_methods import LORA, SALIENCIES, SageMethod, expand, make_model
from hf_memeff.benchmarks.sage_results import CosineResult, cosine_key
from hf_memeff.benchmarks.sage_text import Batch
from hf_memeff.benchmarks.sage_training import load_adapter
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.blocks.attach_salient import set_token_budget

RANDOM, TRAINED = "random", "trained"
_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class CosinePlan:
    """What every measurement has in common.

    Attributes:
        dataset: key of `DATA_SETS`.
        model: name of the base model.
        rank: of the adapter.
        batches: how many.
        rows_per_batch: rows of each.
        longest_row: most tokens of a row.
        b_std: standard deviation of the entries of a random B.
    """

    dataset: str = "gsm8k"
    model: str = "SmolLM2-135M"
    rank: int = 16
    batches: int = 16
    rows_per_batch: int = 4
    longest_row: int = 256
    b_std: float = 0.01


def planned_cosines(budgets: Sequence[float], saliencies: Sequence[str] = SALIENCIES) -> list[SageMethod]:
    """Every saliency and budget: with the last block dense, with none dense, and with the other keys than its own."""
    methods = expand([f"sage-{saliency}" for saliency in saliencies], budgets)
    return [
        *methods,
        *(replace(method, dense_layers=()) for method in methods),
        *(replace(method, backward_keys="kept" if method.backward_keys == "all" else "all") for method in methods),
    ]


@dataclass
class Cosines:
    """The gradients of a model on some batches.

    Attributes:
        plan: what they have in common.
        base: the `PreTrainedModel`, without adapter; it stays so.
        batches: what gradients are computed on.
        trained: what `save_adapter` wrote after LoRA's training run; None if there is none yet.
        shelf: where results go.
        environment: what is measured with.
        say: called with lines for the user.
        advance: called with the name of what runs and the number of gradients just computed.
    """

    plan: CosinePlan
    base: Any
    batches: Sequence[Batch]
    trained: Path | None
    shelf: Shelf[CosineResult]
    environment: Environment
    say: Callable[[str], object] = print
    advance: Callable[[str, int], object] = lambda text, steps: None
    _exact: dict[str, list[list[Tensor]]] = field(default_factory=dict)

    def run(self, methods: Sequence[SageMethod]) -> None:
        """Measure the methods whose result is not there, at a random adapter and after training."""
        for adapter in (RANDOM, TRAINED):
            if adapter == TRAINED and self.trained is None:
                self.say("gradients after training left out: LoRA has not been trained yet (--only learning)")
                continue
            todo = [m for m in methods if self.shelf.find(cosine_key(self.plan.dataset, adapter, m)) is None]
            # one model per saliency; its budget changes in place
            for _, group in groupby(todo, key=lambda method: replace(method, token_budget=None)):
                self._measure(adapter, list(group))

    def steps(self, methods: Sequence[SageMethod]) -> int:
        """How many gradients `run` will report to `advance`."""
        adapters = (RANDOM,) if self.trained is None else (RANDOM, TRAINED)
        missing = [
            sum(self.shelf.find(cosine_key(self.plan.dataset, adapter, method)) is None for method in methods)
            for adapter in adapters
        ]
        return sum((count + 1) * len(self.batches) for count in missing if count)

    def _measure(self, adapter: str, methods: Sequence[SageMethod]) -> None:
        exact = self._exact_gradients(adapter)
        model = self._adapted(methods[0], adapter)
        for method in methods:
            key = cosine_key(self.plan.dataset, adapter, method)
            set_token_budget(model.get_base_model(), float(method.token_budget or 1))
            cosines, ratios, by_block = [], [], []
            for batch, expected in zip(self.batches, exact, strict=True):
                self.advance(key, 0)
                found = block_gradients(model, batch)
                whole, whole_exact = torch.cat(found), torch.cat(expected)
                cosines.append(cosine(whole, whole_exact))
                ratios.append((whole.norm() / whole_exact.norm()).item())
                by_block.append([cosine(own, true) for own, true in zip(found, expected, strict=True)])
                self.advance(key, 1)
            self.shelf.add(
                CosineResult(
                    dataset=self.plan.dataset,
                    model=self.plan.model,
                    adapter=adapter,
                    b_std=self.plan.b_std if adapter == RANDOM else None,
                    saliency=str(method.saliency),
                    token_budget=float(method.token_budget or 1),
                    dense_layers=method.dense_layers,
                    backward_keys=method.backward_keys,
                    rank=self.plan.rank,
                    cosines=tuple(cosines),
                    norm_ratios=tuple(ratios),
                    layer_cosines=tuple(map(statistics.fmean, zip(*by_block, strict=True))),
                    environment=self.environment,
                )
            )
            self.say(f"{key}: cosine {statistics.fmean(cosines):.3f}")

    def _exact_gradients(self, adapter: str) -> list[list[Tensor]]:
        """Plain LoRA's gradients on every batch."""
        if adapter not in self._exact:
            model = self._adapted(LORA, adapter)
            self._exact.clear()  # one adapter's at a time
            self._exact[adapter] = []
            for batch in self.batches:
                self.advance(f"{adapter}: exact gradients", 0)
                self._exact[adapter].append(block_gradients(model, batch))
                self.advance(adapter, 1)
        return self._exact[adapter]

    def _adapted(self, method: SageMethod, adapter: str) -> Any:
        model = make_model(method, self.base, rank=self.plan.rank, seed=SEED)
        if adapter == TRAINED and self.trained is not None:
            load_adapter(model, self.trained)
        else:
            fill_adapters([model], std=self.plan.b_std)
        return model


def block_gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The adapter gradients of one batch: a flat float32 vector per block, in their order."""
    model.zero_grad(set_to_none=True)
    model(**batch, use_cache=False).loss.backward()
    blocks: dict[int, list[Tensor]] = {}
    for name, parameter in sorted(model.named_parameters()):
        if parameter.grad is not None and (match := _BLOCK.search(name)):
            blocks.setdefault(int(match[1]), []).append(parameter.grad.flatten())
    return [torch.cat(blocks[index]) for index in sorted(blocks)]


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two vectors, in float64; not a number if one is zero."""
    a, b = a.double(), b.double()
    return (torch.dot(a, b) / (a.norm() * b.norm())).item()
