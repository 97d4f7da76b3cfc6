"""Density against recall: how many keys each selection rule needs for the recall that AnchorAttention reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_op import OpPlan
from hf_memeff.benchmarks.anchor_peers import causal_softmax
from hf_memeff.benchmarks.anchor_qkv import Qkv, QkvStore, for_length
from hf_memeff.benchmarks.anchor_results import HeatResult, PeerResult, peer_key
from hf_memeff.benchmarks.anchor_rules import ANCHOR, RULES, TITLES, Rule, Select, anchor_selection
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.benchmarks.cases import SEED
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf

_BISECTIONS = 12
_CELLS = 64
_LEAST_MASS = 1e-9


@dataclass(frozen=True)
class PeerPlan:
    """What is compared.

    Attributes:
        model: name of the model.
        tokens: N.
        layers: which to compare in; empty for six spread evenly.
        shifts: logits added to AnchorAttention's calibrated thresholds, for one point of the curve each; 0 is one.
        rows: rows that recall and density are taken over, drawn at random.
    """

    model: str = "SmolLM2-135M"
    tokens: int = 8192
    layers: tuple[int, ...] = ()
    shifts: tuple[float, ...] = (-1.0, 0.0, 1.0)
    rows: int = 512

    def chosen(self, total: int) -> list[int]:
        """The layers, of a model with so many."""
        return OpPlan(layers=self.layers).layers_at(2**31, total)


class Sample:
    """Attention weights of some rows of every head of a layer.

    Args:
        qkv: of the layer.
        rows: (R,) positions, ascending.
    """

    def __init__(self, qkv: Qkv, rows: Tensor) -> None:
        group = qkv.q.shape[1] // qkv.k.shape[1]
        self.rows, self.heads, self.keys = rows, qkv.q.shape[1], qkv.k.shape[2]
        self.weights = [
            causal_softmax(q[rows], qkv.k[0, head // group], qkv.scale, rows) for head, q in enumerate(qkv.q[0])
        ]
        self.causal = torch.arange(self.keys) <= rows[:, None]

    def measure(self, select: Select, parameters: Sequence[float]) -> tuple[float, float]:
        """Recall and density of a rule with a parameter per head, means over heads and rows, and over pairs."""
        recall, attended = 0.0, 0
        for head, (weights, parameter) in enumerate(zip(self.weights, parameters, strict=True)):
            mask = select(head, parameter, self.rows) & self.causal
            recall += (weights * mask).sum(1).mean().item() / self.heads
            attended += int(mask.sum())
        return recall, attended / (self.heads * int(self.causal.sum()))

    def tune(self, rule: Rule, select: Select, wanted: float) -> tuple[float, float, float]:
        """Parameter, recall and density nearest to a recall, by bisection."""
        low, high = 0.0, 1.0
        seen = []
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            parameter = rule.value(middle, self.keys)
            recall, density = self.measure(select, [parameter] * self.heads)
            seen.append((parameter, recall, density))
            low, high = (low, middle) if recall >= wanted else (middle, high)
        return min(seen, key=lambda found: (abs(found[1] - wanted), found[2]))


@dataclass
class Peers:
    """The comparison on a model's layers.

    Attributes:
        plan: what is compared.
        base: the `PreTrainedModel`.
        text: to measure, and to tune the peers, on.
        calibrations: thresholds, from other text.
        folder: where queries, keys and values go.
        shelf: where results go.
        heat: where the picture of one head goes.
        environment: what is measured with.
        advance: called with the name of what runs and the number of steps just done.
    """

    plan: PeerPlan
    base: Any
    text: LongText
    calibrations: Calibrations
    folder: Path
    shelf: Shelf[PeerResult]
    heat: Shelf[HeatResult]
    environment: Environment
    advance: Callable[[str, int], object] = lambda text, steps: None

    def run(self) -> None:
        """Compare where a layer's results are not there."""
        todo = self._todo()
        if not todo:
            return
        tokens = self.plan.tokens
        store = QkvStore(self.folder, f"{tokens}")
        store.fill(for_length(self.base, tokens), self.text.measured(tokens), todo, self.advance)
        generator = torch.Generator().manual_seed(SEED)
        rows = torch.randperm(tokens, generator=generator)[: self.plan.rows].sort().values
        for layer in todo:
            self._layer(layer, store.load(layer), rows)

    def steps(self) -> int:
        """How many steps `run` will report to `advance`."""
        todo = self._todo()
        missing = QkvStore(self.folder, f"{self.plan.tokens}").missing(todo)
        return len(missing) + len(todo) * len(TITLES)

    def _layers(self) -> list[int]:
        return self.plan.chosen(self.base.config.num_hidden_layers)

    def _todo(self) -> list[int]:
        return [layer for layer in self._layers() if not all(self._found(layer, method) for method in TITLES)]

    def _found(self, layer: int, method: str) -> bool:
        found = self.shelf.find(peer_key(self.plan.tokens, layer, method))
        wanted = self.plan.model, self.plan.shifts, self.plan.rows, self.calibrations.tokens
        return found is not None and (found.model, found.shifts, found.rows, found.calibration_tokens) == wanted

    def _layer(self, layer: int, qkv: Qkv, rows: Tensor) -> None:
        sample = Sample(qkv, rows)
        self.advance(f"layer {layer}, {ANCHOR}", 0)
        config = self.calibrations.get(self.plan.tokens)
        thetas = config.head_thresholds(layer, sample.heads)
        select = anchor_selection(qkv, config.step)
        points = [
            (shift, f"step {config.step}", *sample.measure(select, [theta + shift for theta in thetas]))
            for shift in self.plan.shifts
        ]
        if layer == self._layers()[len(self._layers()) // 2]:
            self.heat.add(self._heat(layer, qkv, select, thetas))
        self._add(layer, ANCHOR, points)
        for method in list(TITLES)[1:]:
            self.advance(f"layer {layer}, {method}", 0)
            self._add(layer, method, self._tuned(method, qkv, sample, [point[2] for point in points]))

    def _tuned(
        self, method: str, qkv: Qkv, sample: Sample, wanted: Sequence[float]
    ) -> list[tuple[float, str, float, float]]:
        """The variant with the lowest density at each recall, of those that come close to it."""
        found: list[list[tuple[float, str, float, float]]] = [[] for _ in wanted]
        for rule in (rule for rule in RULES if rule.method == method):
            select = rule.prepare(qkv)
            for place, recall in zip(found, wanted, strict=True):
                parameter, reached, density = sample.tune(rule, select, recall)
                place.append((parameter, rule.variant, reached, density))
        return [
            min(place, key=lambda point: (abs(point[2] - recall) > 0.005, point[3]))
            for place, recall in zip(found, wanted, strict=True)
        ]

    def _add(self, layer: int, method: str, points: Sequence[tuple[float, str, float, float]]) -> None:
        parameters, variants, recalls, densities = zip(*points, strict=True)
        self.shelf.add(
            PeerResult(
                model=self.plan.model,
                tokens=self.plan.tokens,
                layer=layer,
                method=method,
                shifts=self.plan.shifts,
                parameters=parameters,
                variants=variants,
                recalls=recalls,
                densities=densities,
                rows=self.plan.rows,
                calibration_tokens=self.calibrations.tokens,
                environment=self.environment,
            )
        )
        self.advance(f"layer {layer}", 1)

    def _heat(self, layer: int, qkv: Qkv, select: Select, thetas: Sequence[float]) -> HeatResult:
        """The head that keeps neither the most nor the fewest keys."""
        tokens, group = self.plan.tokens, qkv.q.shape[1] // qkv.k.shape[1]
        last = torch.tensor([tokens - 1])
        kept = [int(select(head, theta, last).sum()) for head, theta in enumerate(thetas)]
        head = sorted(range(len(kept)), key=kept.__getitem__)[len(kept) // 2]
        mass, attended = [], []
        for rows in torch.arange(tokens).tensor_split(_CELLS):
            causal = torch.arange(tokens) <= rows[:, None]
            weights = causal_softmax(qkv.q[0, head, rows], qkv.k[0, head // group], qkv.scale, rows)
            mask = select(head, thetas[head], rows) & causal
            pairs = _cell_sums(causal.float())
            mass += (_cell_sums(weights) / len(rows)).clamp_(min=_LEAST_MASS).log10().tolist()
            attended += (_cell_sums(mask.float()) / pairs.clamp(min=1)).tolist()
        return HeatResult(
            model=self.plan.model,
            tokens=tokens,
            layer=layer,
            head=head,
            cells=_CELLS,
            mass=tuple(round(x, 2) for x in mass),
            kept=tuple(round(x, 3) for x in attended),
            environment=self.environment,
        )


def _cell_sums(x: Tensor) -> Tensor:
    """(cells,): sums over all rows and the keys of each cell."""
    return torch.stack([part.sum() for part in x.sum(0).tensor_split(_CELLS)])
