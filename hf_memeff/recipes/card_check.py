"""A rendered card, held against what the Hub accepts and what it has to say; no connection is needed."""

from __future__ import annotations

import math
from typing import Any

from huggingface_hub import ModelCard
from yaml import YAMLError

from hf_memeff.recipes.card_fields import CardError, CardFields, wrong
from hf_memeff.recipes.card_files import refuse_local_paths
from hf_memeff.tuners.portable import CARD_NAME


def check_card(content: str, fields: CardFields) -> None:
    """Refuse a card that the Hub would reject or that does not say what it should.

    Args:
        content: the whole README.md.
        fields: what its metadata has to agree with.

    Raises:
        CardError: the metadata is no YAML, a field is missing or another, a metric is not a finite number, or a path of
            this machine is in it.
    """
    try:
        data = ModelCard(content).data
    except (ValueError, TypeError, YAMLError) as error:
        raise CardError(
            f"Got a card whose metadata cannot be read ({error}), expected YAML as the Hub takes it. Fix: render it "
            "again with hf-memeff card."
        ) from error
    expected = {
        "library_name": "peft",
        "base_model": fields.base_model,
        "license": fields.license,
        "language": fields.language,
        "tags": fields.tags,
    }
    for name, value in expected.items():
        if data.get(name) != value:
            raise wrong(name, data.get(name), repr(value), "render the card again with hf-memeff card")
    for result in data.eval_results or ():
        require_finite(str(result.metric_name), result.metric_value)
    refuse_local_paths(CARD_NAME, content)


def require_finite(name: str, value: Any) -> None:
    """Refuse a metric's value that JSON and the Hub have no number for.

    Args:
        name: of the metric.
        value: what was measured.

    Raises:
        CardError: it is not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise wrong(name, value, "a finite number", "evaluate again; the Hub accepts no other value")
