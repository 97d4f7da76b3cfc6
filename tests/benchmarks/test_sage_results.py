"""Names of SAGE's results."""

from __future__ import annotations


def test_names_tell_results_apart(learning, steps, cosines) -> None:
    for results in (learning, steps, cosines):
        assert len({result.key for result in results}) == len(results)
    assert learning[1].key == "gsm8k-lora-lr0.0003-seed0"
    assert learning[5].key == "gsm8k-sage-gradient-0.25-lr0.001-seed0"
    assert steps[2].key == "gsm8k-4x512-sage-attention-0.25"
    assert cosines[0].key == "gsm8k-random-attention-0.25-dense-1-kept"
    assert cosines[4].key == "gsm8k-random-attention-0.25-densenone-kept"
