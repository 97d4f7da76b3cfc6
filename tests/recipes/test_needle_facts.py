"""Facts that are hidden: each its own, and each answer only behind its own lead."""

from __future__ import annotations

from hf_memeff.recipes.needle_facts import FACTS, grid_needles


def test_facts_do_not_answer_each_other() -> None:
    for fact in FACTS:
        assert fact.fact.startswith(f"{fact.lead} {fact.answer}")
        assert fact.answer not in fact.lead + "".join(fact.questions)
        assert sum(fact.answer in other.fact for other in FACTS) == 1
    assert len({fact.lead for fact in FACTS}) == len({fact.answer for fact in FACTS}) == len(FACTS) == 10


def test_one_question_for_each_depth() -> None:
    needles = grid_needles([0.2, 0.7])
    assert [needle.depth for needle in needles] == [0.2, 0.7]
    assert [needle.questions for needle in needles] == [fact.questions[:1] for fact in FACTS[:2]]
