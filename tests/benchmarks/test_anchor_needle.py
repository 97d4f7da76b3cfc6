"""Needles are where they are said to be; going on from a cached text is as good as the whole prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_needle import METHODS, NEEDLES, Needle, NeedlePlan, Needles, _Session, haystack
from hf_memeff.benchmarks.anchor_prefill import attention
from hf_memeff.benchmarks.anchor_results import NeedleResult
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.integrations.attention import AnchorAttentionConfig, anchor_report, register_anchor

register_anchor()


@pytest.fixture(scope="module")
def text() -> LongText:
    """Random bytes that are letters."""
    return LongText(torch.randint(70, 90, (9000,), generator=torch.Generator().manual_seed(0)), 2500)


def test_a_haystack_holds_every_needle_at_its_depth(text: LongText, tokenizer: Any) -> None:
    hay = haystack(NEEDLES, text, tokenizer, 2400)
    body = tokenizer.decode(hay.body[0])
    longest = max(tail.shape[1] for _, _, tail in hay.tails)
    assert hay.body.shape[1] + longest == 2400
    for needle in NEEDLES:
        assert body.count(f" {needle.fact}") == 1
        assert needle.answer in needle.fact and needle.lead in needle.fact
        assert body.index(needle.fact) / len(body) == pytest.approx(needle.depth, abs=0.06)
    assert [question for _, question, _ in hay.tails] == [q for needle in NEEDLES for q in needle.questions]
    for needle, question, tail in hay.tails:
        words = tokenizer.decode(tail[0])
        assert question in words and words.endswith(needle.lead) and needle.answer not in words


@pytest.mark.parametrize("name", ["sdpa", "anchor"])
def test_questions_go_on_from_the_text_as_one_prompt_would(
    name: str, base: Any, tokenizer: Any, text: LongText
) -> None:
    config = AnchorAttentionConfig(theta=1.0, min_length=1, step=4, dense_above=None)
    hay = haystack(NEEDLES[:1], text, tokenizer, 1300)
    with attention(base, name, config):
        session = _Session(base, tokenizer, hay.body, config, 4)
        assert session.border == 1024
        found = [session.ask(tail, "48213") for _, _, tail in hay.tails * 2]
        assert (anchor_report(base).sparse_calls > 0) == (name == "anchor")
        assert found[:2] == found[2:]  # the cache is as before
        for (_, _, tail), (answer, loss) in zip(hay.tails, found, strict=False):
            right = torch.tensor(tokenizer(" 48213").input_ids)
            prompt = torch.cat([hay.body, tail], 1)
            with torch.no_grad():
                first = base(prompt, use_cache=True)
                rest = base(right[None, :-1], **{session.cache_name: first.past_key_values}).logits[0]
            logits = torch.cat([first.logits[:, -1], rest])
            assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, right).item(), abs=1e-4)
            assert answer[0] == tokenizer.decode(first.logits[0, -1].argmax())


def test_every_method_is_asked_once(base: Any, tokenizer: Any, text: LongText, tmp_path: Path) -> None:
    plan = NeedlePlan(model="tiny", needles=NEEDLES[:1], answer_tokens=2)
    shelf = Shelf(NeedleResult, tmp_path / "needle")
    calibrations = Calibrations(tmp_path / "calibration", base, text.calibration())

    bench = Needles(plan, base, tokenizer, text, calibrations, shelf, Environment.here())
    assert bench.steps([2600]) == 3 * 2
    bench.run([2600])
    assert bench.steps([2600]) == 0
    results = {result.method: result for result in shelf.all()}
    assert set(results) == set(METHODS)
    assert results["dense"].sparse_calls == (0, 0) and results["dense"].step is None
    assert results["sinks-window"].densities == (0.0, 0.0) and min(results["sinks-window"].sparse_calls) > 0
    assert results["anchor"].calibration_tokens == 2500
    assert results["anchor"].expected == ("48213", "48213")
    assert base.config._attn_implementation == "sdpa"


def test_a_hit_is_an_answer_that_holds_the_right_one() -> None:
    needle = Needle("a", 0.5, ("b",), "c", "42")
    fields = dict.fromkeys(("model", "tokens", "method", "step", "calibration_tokens", "questions", "depths"))
    result = NeedleResult(
        **fields,
        expected=(needle.answer, needle.answer),
        answers=(" 42.", " 24."),
        answer_losses=(),
        densities=(),
        sparse_calls=(),
        environment=None,
    )
    assert result.hits == (True, False)
