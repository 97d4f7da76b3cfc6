"""MeZO's estimate: its slope on a quadratic, the parameters afterwards, what it keeps, and its cosine."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memeff import measure_peak_memory, saved_tensor_bytes
from hf_memeff.recipes.mezo import (
    add_direction_,
    directions,
    estimate_slope,
    mezo_gradient_cosine,
    perturbed,
)


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((5, 3), (7,), (2, 2, 2))]


def drawn(ps: list[torch.nn.Parameter], seed: int) -> list[torch.Tensor]:
    return [z for _, z in directions(ps, seed)]


def test_the_slope_on_a_quadratic_is_the_directional_derivative() -> None:
    ps = parameters()
    scales = [torch.rand_like(p) + 0.5 for p in ps]

    def loss() -> torch.Tensor:
        return sum((0.5 * s * p * p + p).sum() for s, p in zip(scales, ps, strict=True))

    gradients = torch.autograd.grad(loss(), ps)
    at_rest = loss().item()
    for seed, epsilon in ((3, 1e-2), (4, 0.5)):  # central differences are exact for any size
        found = estimate_slope(loss, ps, seed, epsilon)
        true = sum((g * z).sum().item() for g, z in zip(gradients, drawn(ps, seed), strict=True))
        assert found.slope == pytest.approx(true, rel=1e-9)
        curvature = sum((s * z * z).sum().item() for s, z in zip(scales, drawn(ps, seed), strict=True))
        assert found.loss == pytest.approx(at_rest + epsilon**2 / 2 * curvature, rel=1e-9)
        assert found.seed == seed


def test_a_seed_is_a_direction() -> None:
    ps = parameters()
    first, again, other = (torch.cat([z.flatten() for z in drawn(ps, seed)]) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(set(first.tolist())) == sum(p.numel() for p in ps)  # no part repeats another's numbers
    before = [p.detach().clone() for p in ps]
    add_direction_(ps, 1, -0.25)
    for p, old, z in zip(ps, before, drawn(ps, 1), strict=True):
        assert torch.equal(p, old - 0.25 * z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parameters_come_back_to_the_rounding_of_two_sums(dtype: torch.dtype) -> None:
    ps = parameters(dtype)
    before = [p.detach().clone() for p in ps]
    with torch.no_grad():
        reached = [old.abs() + 1e-2 * z.abs() for old, z in zip(before, drawn(ps, 5), strict=True)]
    estimate_slope(lambda: sum(p.float().square().sum() for p in ps), ps, 5, 1e-2)
    for p, old, bound in zip(ps, before, reached, strict=True):
        # per evaluation one rounding up and one back, each half a unit in the last place of at most `bound`
        assert ((p - old).abs() <= 2 * torch.finfo(dtype).eps * bound).all()


def test_the_parameters_come_back_after_an_error() -> None:
    ps = parameters()
    before = [p.detach().clone() for p in ps]
    with pytest.raises(ZeroDivisionError), perturbed(ps, 5, 1.0):
        assert not torch.allclose(ps[0], before[0])
        raise ZeroDivisionError
    for p, old in zip(ps, before, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=1e-14, atol=1e-14)


def test_nothing_is_stored() -> None:
    ps = [torch.nn.Parameter(torch.randn(256, 64)) for _ in range(8)]
    largest = ps[0].numel() * 4

    def estimate() -> float:
        return estimate_slope(lambda: ps[0][0, 0], ps, 1, 1e-3).slope

    estimate()
    peak = measure_peak_memory(estimate, "cpu")
    assert largest <= peak.peak_bytes < 1.5 * largest  # one parameter's direction; the generator and scalars
    assert peak.held_bytes == 0
    assert saved_tensor_bytes(lambda: estimate_slope(lambda: ps[0].square().sum(), ps, 1, 1e-3)) == 0
    assert all(p.grad is None for p in ps)


def test_the_cosine_is_that_of_estimate_and_gradient() -> None:
    ps = parameters()
    weights = [torch.randn_like(p) for p in ps]

    def loss() -> torch.Tensor:
        return sum((w * p).sum() for w, p in zip(weights, ps, strict=True))

    found = mezo_gradient_cosine(loss, ps, draws=3, epsilon=1e-3, seed=7)
    true = torch.cat([w.flatten() for w in weights])
    cosines = []
    for seed in (7, 8, 9):
        estimated = estimate_slope(loss, ps, seed, 1e-3).slope * torch.cat([z.flatten() for z in drawn(ps, seed)])
        cosines.append(torch.cosine_similarity(estimated, true, dim=0).item())
    assert found.mean == pytest.approx(sum(cosines) / 3, rel=1e-6)
    spread = math.sqrt(sum((c - found.mean) ** 2 for c in cosines) / 2)
    assert found.standard_error == pytest.approx(spread / math.sqrt(3), rel=1e-6)
    assert (found.draws, found.parameters, found.epsilon) == (3, 30, 1e-3)
    assert all(p.grad is None for p in ps)


def test_a_slope_of_the_wrong_sign_counts_against_it() -> None:
    """At a size of perturbation beyond the loss's period the estimate no longer knows the gradient."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    seed = next(s for s in range(100) if 1.0 < drawn([p], s)[0].abs().item() < 1.2)
    wrong = mezo_gradient_cosine(lambda: torch.sin(p).sum(), [p], draws=2, epsilon=1e-3, seed=seed)
    assert wrong.mean == pytest.approx(1.0)
    # sin over a step of 4 to 4.8 is negative
    found = estimate_slope(lambda: torch.sin(p).sum(), [p], seed, 4.0)
    assert found.slope * drawn([p], seed)[0].item() < 0


def test_the_mean_cosine_falls_with_the_number_of_parameters() -> None:
    for size in (100, 10_000):
        # not seed 0, which the weights come from: the first direction would be the gradient
        p = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
        weight = torch.randn_like(p)
        found = mezo_gradient_cosine(lambda p=p, w=weight: (w * p).sum(), [p], draws=100, epsilon=1.0, seed=1000)
        assert found.expected == pytest.approx(math.sqrt(2 / math.pi / size))
        assert abs(found.mean - found.expected) < 4 * found.standard_error
        assert found.standard_error < 0.2 * found.expected


def test_one_draw_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="Got draws=1, expected at least 2"):
        mezo_gradient_cosine(lambda: torch.zeros(()), [], draws=1)
