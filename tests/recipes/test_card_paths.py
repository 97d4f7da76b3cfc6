"""What counts as a place on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_memeff.recipes.card_paths import is_local_path, local_paths


@pytest.mark.parametrize(
    "value",
    [
        "/home/alice/models/base",
        "/data",
        "/data/my models",
        "~/models",
        "~alice/models",
        "C:\\Users\\alice\\base",
        "D:/models",
        "\\\\server\\share",
        "file:///srv/base",
        "./base",
        "../base",
        "models/../base",
        "first line\nsee /home/alice/x",
    ],
)
def test_places_on_this_machine(value: str) -> None:
    assert is_local_path(value)


@pytest.mark.parametrize(
    "value",
    [
        "Qwen/Qwen2.5-0.5B",
        "gpt2",
        "all-linear",
        r"model\.layers\.\d+\.(q|k)_proj",
        "https://huggingface.co/a/b",
        "eval_rewards/margins",
        "/ per step",
        "",
        "{% if x %}\n[/INST] </s>\n{% endif %}",
    ],
)
def test_names_urls_and_patterns_are_no_places(value: str) -> None:
    assert not is_local_path(value)


def test_a_bare_name_is_a_place_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local_path("outputs/model")
    (tmp_path / "outputs" / "model").mkdir(parents=True)
    assert is_local_path("outputs/model")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"base": "/home/alice/base"}', ["/home/alice/base"]),
        ('{"base": "C:\\\\Users\\\\alice\\\\base"}', ["C:\\\\Users\\\\alice\\\\base"]),
        ("saved in ~/out/run, see file:///srv/x", ["~/out/run", "file:///srv/x"]),
        ("base_model:adapter:x/y and [base](/srv/base/x)", ["/srv/base/x"]),
        ("MiB / step, 3/4 of https://a.b/c/d/e, </div> [/INST] and/or", []),
    ],
)
def test_places_in_running_text(text: str, found: list[str]) -> None:
    assert local_paths(text) == found
