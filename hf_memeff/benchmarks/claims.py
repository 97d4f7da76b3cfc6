"""What a benchmark has to show, as a table with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_memeff.benchmarks.tables import NOT_MEASURED, table


@dataclass(frozen=True)
class Claim:
    """One thing to show.

    Attributes:
        text: what, in words.
        limit: the value to reach; None where it depends on what is not measured yet.
        measured: the value reached; None if it is not measured.
        at_most: whether the value may not exceed the limit, else not fall below it.
    """

    text: str
    limit: float | None
    measured: float | None
    at_most: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether it was shown; None if it is not measured."""
        if self.measured is None or self.limit is None:
            return None
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def claims_rows(title: str, claims: Sequence[Claim]) -> str:
    """Claims as a Markdown table; ``title`` heads the first column."""
    words = {True: "yes", False: "no", None: NOT_MEASURED}
    rows = [
        [
            claim.text,
            "-" if claim.limit is None else f"{'at most' if claim.at_most else 'at least'} {claim.limit:.2f}",
            "-" if claim.measured is None else f"{claim.measured:.3f}",
            words[claim.holds],
        ]
        for claim in claims
    ]
    return table([title, "wanted", "measured", "holds"], rows)
