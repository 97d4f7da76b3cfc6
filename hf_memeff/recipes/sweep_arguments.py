"""The keys that make a fine-tuning config a sweep: methods, budgets and seeds, in one or several settings."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_memeff.benchmarks.sage_methods import NAMES
from hf_memeff.recipes.errors import RecipeError

_SETTING_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass
class SweepArguments:
    """What to compare; see each field's help.

    Raises:
        RecipeError: a value is outside its range.
    """

    methods: list[str] = field(
        default_factory=lambda: list(NAMES),
        metadata={"help": f"Ways to train the same adapter, of {', '.join(NAMES)}."},
    )
    budgets: list[float] = field(
        default_factory=lambda: [0.5], metadata={"help": "Token budgets of each sage method, above 0 and at most 1."}
    )
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2],
        metadata={"help": "Seeds of each method; means and standard deviations are over them."},
    )
    settings: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "By name, keys that differ in a setting. All methods run in each; a setting's keys win over the "
                "command line. None: a single setting."
            )
        },
    )
    random_model: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "Fields of the base model's config to change, such as {num_hidden_layers: 4}: the base model is then "
                "of random weights. None: the weights of the model itself."
            )
        },
    )
    keep_adapters: bool = field(
        default=False, metadata={"help": "Whether each run's adapter is kept beside its results."}
    )

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in NAMES:
                raise RecipeError(
                    f"Got methods: {method}, expected some of {', '.join(NAMES)}. Fix: pass some of these."
                )
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise RecipeError(f"Got budgets: {budget}, expected above 0 and at most 1. Fix: pass 0.25 or 0.5.")
        for name in ("methods", "budgets", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise RecipeError(f"Got {name}: {values}, expected at least one, and none twice. Fix: name each once.")
        self.settings = _mapping("settings", self.settings)
        self.random_model = _mapping("random_model", self.random_model)
        for name, changes in self.by_setting.items():
            if not _SETTING_NAME.fullmatch(name) or not isinstance(changes, dict) or "settings" in changes:
                raise RecipeError(
                    f"Got settings with {name}: {changes}, expected a name that can be a folder's, and keys. "
                    "Fix: write it like {boolq: {dataset_name: boolq.jsonl}}."
                )

    @property
    def by_setting(self) -> Mapping[str, dict[str, Any]]:
        """Keys that differ, by setting."""
        return self.settings if isinstance(self.settings, dict) and self.settings else {"main": {}}

    @property
    def random_fields(self) -> Mapping[str, Any] | None:
        """Fields of a random base model's config; None where the base model has its own weights."""
        return self.random_model if isinstance(self.random_model, dict) else None


def _mapping(name: str, value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # then it stays text, which is refused
            value = json.loads(value)
    if value is None or isinstance(value, dict):
        return value
    raise RecipeError(f'Got {name}: {value}, expected names and values. Fix: write it like {{"name": 1}}.')


def method_changes(name: str, token_budget: float | None) -> dict[str, Any]:
    """The keys of a fine-tuning config that make it train one way.

    Args:
        name: of the method, one of `NAMES`.
        token_budget: SAGE's; None for the others.
    """
    # TRL checkpoints by default, so that plain LoRA has to say that it does not
    changes: dict[str, Any] = {
        "method": next(kind for kind in ("lora", "mesp", "sage") if name.startswith(kind)),
        "gradient_checkpointing": name == "lora-checkpointing",
    }
    if token_budget is not None:
        changes |= {"saliency": name.removeprefix("sage-"), "token_budget": token_budget}
    return changes
