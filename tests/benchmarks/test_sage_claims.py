"""A claim holds, does not, or is not measured; nothing in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memeff.benchmarks.sage_claims import claims, claims_table
from hf_memeff.benchmarks.tables import NOT_MEASURED


def test_all_claims_from_what_was_measured(learning, steps, cosines) -> None:
    found = {claim.text: claim for claim in claims(learning, steps, cosines)}
    assert len(found) == 4 + 2 + 4
    told = {text: (claim.limit, claim.measured, claim.holds) for text, claim in found.items()}
    assert told["step time by LoRA + checkpointing's, attention"] == (0.62, 0.5, True)
    assert told["step time by LoRA's, attention"] == (0.85, 0.75, True)
    assert told["peak by MeSP's, attention"] == (0.72, 0.8, False)
    assert told["cached bytes by MeSP's, attention"] == (0.6, 0.5, True)
    assert told["cosine to the exact gradient, attention"] == (0.5, 0.45, False)
    assert told["cosine to the exact gradient, gradient"] == (0.8, 0.86, True)
    assert told["share of LoRA's improvement, gradient"] == (0.95, pytest.approx(0.9776, abs=1e-3), True)
    assert told["share of LoRA's improvement, attention"] == (0.8, None, None)  # a seed is missing
    above = found["that share above random's, against the larger spread over the seeds, gradient"]
    random = [0.4, 0.4 / 0.9, 0.5]
    assert above.limit == pytest.approx(max(random) - min(random))
    assert above.measured == pytest.approx((0.98 + 0.88 / 0.9 + 0.975) / 3 - sum(random) / 3)
    assert above.holds


def test_an_advantage_within_the_spread_does_not_count(learning) -> None:
    text = "that share above random's, against the larger spread over the seeds, gradient"
    wide = [replace(r, test_loss=(1.0, 1.6, 2.2)[r.seed]) if r.method == "sage-random" else r for r in learning]
    (claim,) = [claim for claim in claims(wide, [], []) if claim.text == text]
    assert claim.measured > 0
    assert claim.holds is False


def test_the_table_says_yes_no_and_not_measured(learning, steps, cosines) -> None:
    text = claims_table(learning, steps, cosines)
    assert "| peak by MeSP's, attention | at most 0.72 | 0.800 | no |" in text
    assert "| cosine to the exact gradient, gradient | at least 0.80 | 0.860 | yes |" in text
    assert f"| share of LoRA's improvement, attention | at least 0.80 | - | {NOT_MEASURED} |" in text
    assert claims_table([], [], []) == NOT_MEASURED
    assert claims_table([], steps, []).count(NOT_MEASURED) == 6
