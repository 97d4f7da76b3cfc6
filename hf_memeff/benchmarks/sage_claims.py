"""What SAGE has to show, against what was measured; a claim that does not hold is in the table like any other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hf_memeff.benchmarks.claims import Claim, claims_rows
from hf_memeff.benchmarks.sage_cosine import RANDOM
from hf_memeff.benchmarks.sage_methods import LORA, MESP, SageMethod
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult
from hf_memeff.benchmarks.sage_runs import SEEDS
from hf_memeff.benchmarks.sage_steps import CHECKPOINTING
from hf_memeff.benchmarks.sage_tables import HEADLINE_BUDGET, find_cosine, find_step, recovered_shares, time_ratio
from hf_memeff.benchmarks.tables import NOT_MEASURED

_ATTENTION, _GRADIENT, _RANDOM = (
    SageMethod(f"sage-{saliency}", HEADLINE_BUDGET) for saliency in ("attention", "gradient", "random")
)
_LEARNING_DATASET = "gsm8k"


def claims(
    learning: Sequence[LearningResult], steps: Sequence[StepResult], cosines: Sequence[CosineResult]
) -> list[Claim]:
    """All claims, at a budget of 0.25."""
    return [*_step_claims(steps), *_cosine_claims(cosines), *_learning_claims(learning)]


def claims_table(
    learning: Sequence[LearningResult], steps: Sequence[StepResult], cosines: Sequence[CosineResult]
) -> str:
    """The claims as a table."""
    if not (learning or steps or cosines):
        return NOT_MEASURED
    return claims_rows("at a token budget of 0.25", claims(learning, steps, cosines))


def _step_claims(steps: Sequence[StepResult]) -> list[Claim]:
    own, mesp = find_step(steps, _ATTENTION), find_step(steps, MESP)
    by_checkpointing = by_lora = peak = cached = None
    if own is not None:
        by_checkpointing, by_lora = time_ratio(own, CHECKPOINTING), time_ratio(own, LORA)
        if mesp is not None:
            peak, cached = _ratio(own.peak_bytes, mesp.peak_bytes), _ratio(own.cached_bytes, mesp.cached_bytes)
    return [
        Claim("step time by LoRA + checkpointing's, attention", 0.62, by_checkpointing, at_most=True),
        Claim("step time by LoRA's, attention", 0.85, by_lora, at_most=True),
        Claim("peak by MeSP's, attention", 0.72, peak, at_most=True),
        Claim("cached bytes by MeSP's, attention", 0.6, cached, at_most=True),
    ]


def _cosine_claims(cosines: Sequence[CosineResult]) -> list[Claim]:
    found = []
    for method, limit in ((_ATTENTION, 0.5), (_GRADIENT, 0.8)):
        own = find_cosine(cosines, RANDOM, method)
        mean = None if own is None else statistics.fmean(own.cosines)
        found.append(Claim(f"cosine to the exact gradient, {method.saliency}", limit, mean))
    return found


def _learning_claims(learning: Sequence[LearningResult]) -> list[Claim]:
    found = []
    random = _all_seeds(learning, _RANDOM)
    for method, limit in ((_ATTENTION, 0.8), (_GRADIENT, 0.95)):
        own = _all_seeds(learning, method)
        found.append(
            Claim(f"share of LoRA's improvement, {method.saliency}", limit, statistics.fmean(own) if own else None)
        )
        both = own and random
        found.append(
            Claim(
                f"that share above random's, against the larger spread over the seeds, {method.saliency}",
                max(max(shares) - min(shares) for shares in (own, random)) if both else None,
                statistics.fmean(own) - statistics.fmean(random) if both else None,
            )
        )
    return found


def _all_seeds(learning: Sequence[LearningResult], method: SageMethod) -> list[float]:
    """The shares recovered with every seed; none if a seed is missing."""
    shares = recovered_shares(learning, _LEARNING_DATASET, method)
    return [shares[seed] for seed in SEEDS] if set(SEEDS) <= set(shares) else []


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
