"""The keys of a sweep: defaults, what is refused, and what a method stands for in a fine-tuning config."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memeff.benchmarks.sage_methods import NAMES
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.sweep_arguments import SweepArguments, method_changes


def test_defaults_are_every_method_in_one_setting() -> None:
    arguments = SweepArguments()
    assert arguments.methods == list(NAMES) and arguments.seeds == [0, 1, 2]
    assert arguments.by_setting == {"main": {}} and arguments.random_fields is None


def test_mappings_may_be_json() -> None:
    arguments = SweepArguments(settings='{"a": {"max_steps": 3}}', random_model='{"hidden_size": 8}')
    assert arguments.by_setting == {"a": {"max_steps": 3}} and arguments.random_fields == {"hidden_size": 8}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"methods": ["sage"]}, "methods: sage"),
        ({"methods": []}, "at least one"),
        ({"seeds": [1, 1]}, "none twice"),
        ({"budgets": [0.5, 1.5]}, "budgets: 1.5"),
        ({"settings": "a"}, "settings: a"),
        ({"settings": {"../a": {}}}, "expected a name"),
        ({"settings": {"a": 3}}, "a: 3"),
        ({"settings": {"a": {"settings": {}}}}, "expected a name"),
        ({"random_model": "[1]"}, "random_model"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(RecipeError, match=r"expected.*Fix:") as caught:
        SweepArguments(**fields)
    assert part in str(caught.value)


def test_methods_as_keys() -> None:
    assert method_changes("lora", None) == {"method": "lora", "gradient_checkpointing": False}
    assert method_changes("lora-checkpointing", None) == {"method": "lora", "gradient_checkpointing": True}
    assert method_changes("sage-value_norm", 0.5) == {
        "method": "sage",
        "gradient_checkpointing": False,
        "saliency": "value_norm",
        "token_budget": 0.5,
    }
