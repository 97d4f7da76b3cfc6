"""A claim holds, does not, or is not measured; its table says which."""

from __future__ import annotations

from hf_memeff.benchmarks.claims import Claim, claims_rows


def test_limits_hold_from_either_side() -> None:
    assert [Claim("", 0.5, value).holds for value in (0.4, 0.5, None, float("nan"))] == [False, True, None, False]
    assert [Claim("", 0.5, value, at_most=True).holds for value in (0.4, 0.5, 0.6)] == [True, True, False]
    assert Claim("", None, 0.5).holds is None


def test_the_table_says_what_was_wanted_and_what_was_measured() -> None:
    lines = claims_rows("title", [Claim("a", 0.5, 0.6, at_most=True), Claim("b", None, None)]).splitlines()
    assert lines[0] == "| title | wanted | measured | holds |"
    assert lines[2:] == ["| a | at most 0.50 | 0.600 | no |", "| b | - | - | not measured yet |"]
