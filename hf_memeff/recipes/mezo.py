"""MeZO's gradient estimate: the slope of the loss along a random direction, which is drawn again instead of kept.

Source: "Fine-Tuning Language Models with Just Forward Passes", arXiv 2305.17333, definition 1 and algorithm 1. It
differs in one place: the parameters go back to their values between the two evaluations, so that whatever happens in
one of them leaves the model as it was; this costs one more draw of the direction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

PUBLISHED_LORA_EPSILON = 1e-2
"""Size of the perturbation for LoRA, from the authors' scripts for OPT-13B (princeton-nlp/MeZO, large_models)."""

PAPER_COSINE = 0.001
"""Cosine of MeZO's estimate to the exact gradient that the paper on MeSP states (arXiv 2602.13069)."""


@dataclass(frozen=True)
class SlopeEstimate:
    """The loss along one direction ``z``; the estimated gradient is ``slope * z``.

    Attributes:
        seed: that ``z`` is drawn from.
        slope: ``(L(p + e z) - L(p - e z)) / (2 e)``.
        loss: mean of the two losses.
    """

    seed: int
    slope: float
    loss: float


def directions(parameters: Sequence[Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw a direction, entries from N(0, 1), one parameter after the other; the same seed gives the same one.

    Args:
        parameters: of any shapes; their order matters, since they share a generator (per device).
        seed: of the direction.

    Yields:
        Each parameter, and its part of the direction in its shape, dtype and device. No more than one part is alive,
        unless the caller keeps it.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        device, dtype = parameter.device, parameter.dtype
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        yield parameter, torch.randn(parameter.shape, generator=generators[device], dtype=dtype, device=device)


@torch.no_grad()
def add_direction_(parameters: Sequence[Tensor], seed: int, scale: float) -> None:
    """Add ``scale * z(seed)`` to the parameters, in place."""
    for parameter, z in directions(parameters, seed):
        parameter.add_(z, alpha=scale)
        del z  # else it is still there while the next part is drawn


@contextmanager
def perturbed(parameters: Sequence[Tensor], seed: int, scale: float) -> Iterator[None]:
    """Inside of a ``with`` block the parameters are ``scale * z(seed)`` further.

    Afterwards they are what they were, but for the rounding of one addition and one subtraction in their dtype.
    """
    add_direction_(parameters, seed, scale)
    try:
        yield
    finally:
        add_direction_(parameters, seed, -scale)


def estimate_slope(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], seed: int, epsilon: float
) -> SlopeEstimate:
    """Estimate the slope of a loss along a random direction from two evaluations (SPSA).

    Args:
        loss: computes the loss, a tensor of one element, at the parameters' values of that moment; called twice,
            without a graph. It has to be the same function both times: no dropout.
        parameters: what it is a function of; as they were when this returns.
        seed: of the direction.
        epsilon: e above, above 0.

    Returns:
        The estimate; its error is of order e^2.
    """
    values = []
    for scale in (epsilon, -epsilon):
        with torch.no_grad(), perturbed(parameters, seed, scale):
            values.append(loss().item())
    return SlopeEstimate(seed, (values[0] - values[1]) / (2 * epsilon), (values[0] + values[1]) / 2)


@dataclass(frozen=True)
class GradientCosine:
    """How near MeZO's estimates come to the exact gradient.

    Attributes:
        mean: of the cosine over the draws.
        standard_error: of the mean; standard deviation by the root of the number of draws.
        draws: how many directions, one estimate each.
        parameters: d, how many numbers the gradient has.
        epsilon: size of the perturbation.
    """

    mean: float
    standard_error: float
    draws: int
    parameters: int
    epsilon: float

    @property
    def expected(self) -> float:
        """What exact slopes would give on average, ``sqrt(2 / (pi d))``: the cosine of a random direction's size."""
        return math.sqrt(2 / (math.pi * self.parameters))


def mezo_gradient_cosine(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    draws: int = 20,
    epsilon: float = PUBLISHED_LORA_EPSILON,
    seed: int = 0,
) -> GradientCosine:
    """Measure the cosine of MeZO's gradient estimate to the gradient of backpropagation.

    Args:
        loss: as for `estimate_slope`, and differentiable.
        parameters: leaves that require gradients; what they have as `grad` stays.
        draws: independent directions, at least 2.
        epsilon: size of the perturbation.
        seed: of the first direction; the others follow.

    Raises:
        ValueError: fewer than 2 draws.
    """
    if draws < 2:
        raise ValueError(
            f"Got draws={draws}, expected at least 2. Fix: pass draws=20, as the standard error needs some."
        )
    gradients = torch.autograd.grad(loss(), list(parameters))
    norm = _norm(gradients)
    cosines = []
    for number in range(seed, seed + draws):
        estimate = estimate_slope(loss, parameters, number, epsilon)
        along, square = 0.0, 0.0
        for (_, z), gradient in zip(directions(parameters, number), gradients, strict=True):
            along += (z.double() * gradient.double()).sum().item()
            square += z.double().square().sum().item()
        cosines.append(math.copysign(1.0, estimate.slope) * along / (math.sqrt(square) * norm))
    return GradientCosine(
        mean=statistics.mean(cosines),
        standard_error=statistics.stdev(cosines) / math.sqrt(draws),
        draws=draws,
        parameters=sum(p.numel() for p in parameters),
        epsilon=epsilon,
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))
