"""Measure the memory tables: models at one length, lengths and ranks at one model, in each precision."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hf_memeff.benchmarks.comparison import timed
from hf_memeff.benchmarks.results import Environment, write_results
from hf_memeff.memory import measure_peak_memory
from hf_memeff.recipes.errors import RecipeError, make_output
from hf_memeff.recipes.memory_tables.methods import (
    METHODS,
    SWEPT,
    StepMethod,
    blocks_run_as,
    loss_runs_as,
    make_step,
)
from hf_memeff.recipes.memory_tables.models import adapted_widths, build_base, bytes_of, trained, with_adapter
from hf_memeff.recipes.memory_tables.products import SkippedProducts
from hf_memeff.recipes.memory_tables.results import CosineFigure, MemoryFigure
from hf_memeff.recipes.memory_tables.settings import SHAPES, TableSettings
from hf_memeff.recipes.memory_tables.tables import render
from hf_memeff.recipes.mezo import mezo_gradient_cosine

RESULTS_NAME, COSINE_NAME, TABLES_NAME = "memory_tables.json", "mezo_cosine.json", "memory_tables.md"

GRADIENT_LIMITS = {"fp32": 1e-5, "nf4": 5e-2}
"""Largest ``|g - g_lora| / |g_lora|`` of a way with exact gradients: sums in another order, and in bfloat16 roundings
of 2^-9 over some hundred operations, while a wrong formula shows as tens of percent."""

_CHECKED_TOKENS, _CHECKED_LAYERS = 24, 2
_WARM_UP_TOKENS = 16


@dataclass
class MemoryTables:
    """A run.

    Attributes:
        settings: what to measure.
        say: called with lines for the user.
        figures: what is measured so far.
    cosine: of MeZO's estimate, once it is measured.
    """

    settings: TableSettings
    say: Callable[[str], object] = print
    figures: list[MemoryFigure] = field(default_factory=list)
    cosine: CosineFigure | None = None

    def run(self) -> None:
        """Check every way's gradients on a tiny model, measure, and write tables and results.

        Raises:
            RecipeError: gradients are not LoRA's, or the output folder cannot be written to.
        """
        settings, device = self.settings, str(self.settings.device)
        folder = make_output(settings.output_dir)
        environment = Environment.here(device)
        for precision in settings.precisions:
            largest = self._check_gradients(precision)
            self.say(f"{precision}: gradients of all ways are LoRA's to {largest:.1e} (tiny model)")
        for precision in settings.precisions:
            for model, cases in self._cases().items():
                self._measure(model, precision, cases, environment)
                write_results(self.figures, folder / RESULTS_NAME)
        if settings.draws:
            self.cosine = self._cosine(environment)
            write_results([self.cosine], folder / COSINE_NAME)
        text = render(self.figures, self.cosine)
        (folder / TABLES_NAME).write_text(text + "\n", encoding="utf-8")
        self.say(text)
        self.say(f"Wrote {folder / TABLES_NAME} and {folder / RESULTS_NAME}.")

    def _cases(self) -> dict[str, dict[tuple[int, int], Sequence[str]]]:
        """Methods by tokens and rank, by model."""
        settings = self.settings
        cases: dict[str, dict[tuple[int, int], Sequence[str]]] = {
            model: {(settings.tokens, settings.rank): tuple(METHODS)} for model in settings.models
        }
        first = cases[settings.models[0]]
        for tokens in settings.lengths:
            first.setdefault((tokens, settings.rank), SWEPT)
        for rank in settings.ranks:
            first.setdefault((settings.tokens, rank), SWEPT)
        return cases

    def _measure(
        self,
        name: str,
        precision: str,
        cases: dict[tuple[int, int], Sequence[str]],
        environment: Environment,
    ) -> None:
        settings, device, shape = self.settings, str(self.settings.device), SHAPES[name]
        layers = min(settings.layers or shape.layers, shape.layers)
        base = build_base(shape, precision, device, layers, settings.seed)
        weights = _weight_bytes(base, layers)
        for rank, own in groupby(sorted(cases, key=lambda case: case[1]), key=lambda case: case[1]):
            model = with_adapter(base, precision, rank, settings.seed)
            for tokens, _ in own:
                ids = _tokens(tokens, shape.vocabulary, settings.seed).to(device)
                h_bytes, h_seconds = self._h(model, tokens)
                for method, (peak, meter, seconds) in self._methods(model, ids, cases[tokens, rank]).items():
                    self.say(f"{name}, {precision}, {tokens} tokens, rank {rank}: {METHODS[method].title}")
                    self.figures.append(
                        MemoryFigure(
                            model=name,
                            precision=precision,
                            layers=layers,
                            layers_of_model=shape.layers,
                            tokens=tokens,
                            rank=rank,
                            method=method,
                            device=device,
                            products=settings.products,
                            seed=settings.seed,
                            mlp_tile_tokens=settings.mlp_tile_tokens,
                            peak_bytes=peak,
                            meter=meter,
                            weight_bytes=weights,
                            gradient_bytes=bytes_of(trained(model)),
                            h_bytes=h_bytes,
                            h_seconds=h_seconds,
                            step_seconds=seconds,
                            environment=environment,
                        )
                    )
            base = model.unload()

    def _methods(
        self, model: Any, ids: Tensor, methods: Sequence[str]
    ) -> dict[str, tuple[int | None, str, tuple[float, ...]]]:
        """Peak bytes, meter and seconds of each method's step."""
        device = str(self.settings.device)
        found: dict[str, tuple[int | None, str, tuple[float, ...]]] = {}
        for blocks, group in groupby((METHODS[key] for key in methods), key=lambda method: method.blocks):
            with blocks_run_as(model, blocks, self.settings.mlp_tile_tokens or None):
                for method in group:
                    with loss_runs_as(model, method.tiled_loss), self._arithmetic():
                        step = self._ready(model, method, ids)
                        peak = measure_peak_memory(step, device)
                        seconds = tuple(timed(step, device) for _ in range(self.settings.rounds))
                    found[method.key] = (peak.peak_bytes, peak.meter, seconds)
        return found

    def _ready(self, model: Any, method: StepMethod, ids: Tensor) -> Callable[[], None]:
        """The method's step, after one on a few tokens, for what a model does only once."""
        for parameter in trained(model):
            parameter.grad = None if method.blocks == "forward" else torch.zeros_like(parameter)
        make_step(model, method, ids[:, :_WARM_UP_TOKENS])()
        return make_step(model, method, ids)

    def _arithmetic(self) -> Any:
        return SkippedProducts() if self.settings.products == "skipped" else nullcontext()

    def _h(self, model: Any, tokens: int) -> tuple[int, float | None]:
        """Bytes of all h of a step, and what computing them once takes."""
        widths = adapted_widths(model)
        like = trained(model)[0]
        size = sum(tokens * rank * like.element_size() for _, rank in widths)
        if not self.settings.rounds:
            return size, None
        inputs = {width: torch.ones(tokens, width, dtype=like.dtype, device=like.device) for width, _ in widths}
        factors = {pair: torch.ones(pair, dtype=like.dtype, device=like.device) for pair in widths}

        def recompute() -> None:
            for width, rank in widths:
                inputs[width] @ factors[width, rank]

        return size, statistics.median(timed(recompute, like.device) for _ in range(self.settings.rounds))

    def _check_gradients(self, precision: str) -> float:
        """The largest error of a way's gradients against plain LoRA's, on a tiny model."""
        settings, device, shape = self.settings, str(self.settings.device), SHAPES["tiny"]
        base = build_base(shape, precision, device, _CHECKED_LAYERS, settings.seed)
        model = with_adapter(base, precision, settings.rank, settings.seed)
        ids = _tokens(_CHECKED_TOKENS, shape.vocabulary, settings.seed).to(device)
        gradients: dict[str, Tensor] = {}
        for key, method in METHODS.items():
            if method.blocks == "forward":
                continue
            with blocks_run_as(model, method.blocks), loss_runs_as(model, method.tiled_loss):
                found = torch.autograd.grad(model(input_ids=ids, labels=ids, use_cache=False).loss, trained(model))
            gradients[key] = torch.cat([g.flatten().double().cpu() for g in found])
        true = gradients["lora-stock-loss"]
        errors = {key: ((g - true).norm() / true.norm()).item() for key, g in gradients.items()}
        worst = max(errors, key=lambda key: errors[key])
        if not errors[worst] <= GRADIENT_LIMITS[precision]:
            raise RecipeError(
                f"Got gradients of {METHODS[worst].title} that differ from LoRA's by {errors[worst]:.1e} "
                f"({precision}), expected at most {GRADIENT_LIMITS[precision]:.0e}. Fix: run the package's tests with "
                "these versions."
            )
        return errors[worst]

    def _cosine(self, environment: Environment) -> CosineFigure:
        settings, device = self.settings, str(self.settings.device)
        name = settings.models[0]
        layers = min(settings.cosine_layers, SHAPES[name].layers)
        base = build_base(SHAPES[name], "fp32", device, layers, settings.seed)
        model = with_adapter(base, "fp32", settings.rank, settings.seed)
        ids = _tokens(settings.cosine_tokens, SHAPES[name].vocabulary, settings.seed).to(device)
        self.say(f"{name}, {layers} blocks: cosine of MeZO's estimate over {settings.draws} directions")
        with loss_runs_as(model, tiled=True):
            found = mezo_gradient_cosine(
                partial(_loss, model, ids), trained(model), draws=settings.draws, seed=settings.seed
            )
        return CosineFigure(
            model=name,
            layers=layers,
            tokens=settings.cosine_tokens,
            rank=settings.rank,
            parameters=found.parameters,
            epsilon=found.epsilon,
            draws=found.draws,
            mean=found.mean,
            standard_error=found.standard_error,
            expected=found.expected,
            seed=settings.seed,
            environment=environment,
        )


def _loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _tokens(count: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def _weight_bytes(base: Any, layers: int) -> int:
    """Bytes of a model whose blocks have weights of their own."""
    block = list(base.model.layers[0].parameters())
    return bytes_of(list(base.parameters())) + (layers - 1) * bytes_of(block)
