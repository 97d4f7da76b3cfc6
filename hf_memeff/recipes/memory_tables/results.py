"""What is measured for the memory tables, as it stands in the results file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from hf_memeff.benchmarks.results import Environment


@dataclass(frozen=True)
class MemoryFigure:
    """One method on one model, length and rank.

    Attributes:
        model: name of the shape.
        precision: "nf4" (base in 4 bits under bfloat16, adapter bfloat16) or "fp32".
        layers: decoder blocks that ran.
        layers_of_model: those the model has.
        tokens: length of the one sequence.
        rank: of the adapter on every linear layer of the blocks.
        method: key of `METHODS`.
        device: "cpu" or "cuda".
        products: "computed", or "skipped" where matrix products were allocated but not computed.
        seed: of weights, adapter and tokens.
        mlp_tile_tokens: MeSP's option, 0 for its own choice; other methods have no tiles.
        peak_bytes: most bytes alive during forward, backward and SGD's step, above weights, adapter and the adapter's
            gradients.
        meter: name of the meter.
        weight_bytes: what a model of ``layers`` blocks with weights of their own takes, without adapter.
        gradient_bytes: the adapter's gradients, which MeZO does not have; the adapter takes as much.
        h_bytes: all h = x A^T of a step.
        h_seconds: what computing all h of a step once takes alone; None where no step was timed.
        step_seconds: one entry per timed round.
        environment: what it was measured with.
    """

    model: str
    precision: str
    layers: int
    layers_of_model: int
    tokens: int
    rank: int
    method: str
    device: str
    products: str
    seed: int
    mlp_tile_tokens: int
    peak_bytes: int | None
    meter: str
    weight_bytes: int
    gradient_bytes: int
    h_bytes: int
    h_seconds: float | None
    step_seconds: tuple[float, ...]
    environment: Environment

    @property
    def seconds(self) -> float | None:
        """Median of the timed rounds."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


@dataclass(frozen=True)
class CosineFigure:
    """Cosine of MeZO's gradient estimate to the exact one, see `GradientCosine`.

    Attributes:
        model: name of the shape.
        layers: decoder blocks that ran.
        tokens: length of the one sequence.
        rank: of the adapter.
        parameters: trained numbers.
        epsilon: size of the perturbation.
        draws: directions.
        mean: of the cosine.
        standard_error: of the mean.
        expected: what exact slopes give on average at this number of parameters.
        seed: of weights, adapter, tokens and directions.
        environment: what it was measured with.
    """

    model: str
    layers: int
    tokens: int
    rank: int
    parameters: int
    epsilon: float
    draws: int
    mean: float
    standard_error: float
    expected: float
    seed: int
    environment: Environment
