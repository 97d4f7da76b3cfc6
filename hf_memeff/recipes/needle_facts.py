"""Facts to hide in a long text, each of its own kind, so that none is an answer to another's question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_memeff.benchmarks.anchor_needle import NEEDLES, Needle


def _fact(lead: str, answer: str, question: str) -> Needle:
    return Needle(f"{lead} {answer}.", 0.0, (question,), lead, answer)


FACTS = (
    *NEEDLES,
    _fact(
        "The ferry to the island leaves from pier number", "17", "From which pier does the ferry to the island leave?"
    ),
    _fact(
        "The violin of the young teacher was built in", "Cremona", "Where was the violin of the young teacher built?"
    ),
    _fact("The tallest tree in the park is an old", "cedar", "What kind of tree is the tallest one in the park?"),
    _fact("The password of the reading room is", "marigold", "What is the password of the reading room?"),
    _fact("The night train arrives on platform", "9", "On which platform does the night train arrive?"),
    _fact("The baker of the village keeps a tame", "raven", "Which animal does the baker of the village keep?"),
    _fact("The museum is closed to visitors on every", "Tuesday", "On which day is the museum closed to visitors?"),
)
"""The benchmark's three, and seven more; the answer is what follows the lead."""


def grid_needles(depths: Sequence[float]) -> tuple[Needle, ...]:
    """One fact for each depth, asked for in its own words.

    Args:
        depths: from 0, the start of the text, to 1; at most as many as there are `FACTS`.
    """
    pairs = zip(FACTS, depths, strict=False)
    return tuple(replace(fact, depth=depth, questions=fact.questions[:1]) for fact, depth in pairs)
