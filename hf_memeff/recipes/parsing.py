"""A YAML file and command-line words, through TRL's parser, to the configs of run, trainer and adapter."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from trl import DPOConfig, SFTConfig

from hf_memeff.recipes.arguments import METHODS, TRAINERS, RunArguments
from hf_memeff.recipes.config_keys import (
    KeyParser,
    config_arguments,
    explained,
    given_values,
    key_of,
    parsed_keys,
    read_config,
)
from hf_memeff.tuners.mesp import MespConfig
from hf_memeff.tuners.sage import SageConfig

TRAINER_CONFIGS: dict[str, type[Any]] = {"sft": SFTConfig, "dpo": DPOConfig}
ADAPTER_CONFIGS: dict[str, type[LoraConfig]] = {"mesp": MespConfig, "sage": SageConfig, "lora": LoraConfig}

_SET_BY_PEFT = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "megatron_core",
}


@dataclass
class RunPlan:
    """A config, resolved.

    Attributes:
        run: model, data and judging.
        training: the trainer's `SFTConfig` or `DPOConfig`.
        adapter: the adapter's `MespConfig`, `SageConfig` or `LoraConfig`.
        own: values of the keys that the caller added.
    """

    run: RunArguments
    training: Any
    adapter: LoraConfig
    own: Any = None


def parse_plan(
    config: Path,
    words: Sequence[str] = (),
    *,
    own: type[Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> RunPlan:
    """Read a config file, with some of its fields replaced.

    Args:
        config: YAML file; its keys are fields of `RunArguments`, of the trainer's config, of the adapter's config, and
            `env`, TRL's mapping of environment variables.
        words: command-line words such as ``--learning_rate 1e-4``; they win over the file.
        own: dataclass whose fields are keys as well, for what consists of several runs.
        changes: keys that win over file and words, with values as a file has them.

    Returns:
        The plan. Without an accelerator ``use_cpu`` is on, unless it was given.

    Raises:
        RecipeError: the file is missing or no mapping, a key is unknown, or a value is of the wrong type or range.
    """
    content = {**read_config(config), **(changes or {})}
    words = _without(words, changes or {})
    kinds = KeyParser(_Kinds, allow_abbrev=False, add_help=False)
    kinds.set_defaults_with_config(**{name: content[name] for name in ("trainer", "method") if name in content})
    chosen = kinds.parse_args_into_dataclasses(list(words), return_remaining_strings=True)[0]
    RunArguments(trainer=chosen.trainer, method=chosen.method)  # refuses what is neither
    trainer, method = TRAINER_CONFIGS[chosen.trainer], ADAPTER_CONFIGS[chosen.method]
    named = f"{trainer.__name__}, {method.__name__} or the run's own"
    classes: list[type[Any]] = [RunArguments, trainer, config_arguments(method, _adapter_fields(method))]
    classes += [own] if own else []
    prog = None if own else "hf-memeff finetune"
    defaults = {} if torch.accelerator.is_available() else {"use_cpu": True}
    parsed = parsed_keys(config, content, words, classes, named, prog=prog, defaults=defaults, others=_other_kinds())
    with explained(config, named):
        adapter = method(task_type="CAUSAL_LM", **given_values(parsed[2]))
    return RunPlan(parsed[0], parsed[1], adapter, parsed[3] if own else None)


@dataclass
class _Kinds:
    trainer: str = "sft"
    method: str = "mesp"


def _adapter_fields(config_class: type[Any]) -> list[dataclasses.Field[Any]]:
    """Fields that a config file can hold: one value each, and not what PEFT fills in by itself."""
    return [f for f in fields(config_class) if f.init and f.name not in _SET_BY_PEFT and not f.name.endswith("_config")]


def _other_kinds() -> dict[str, tuple[str, str]]:
    """By field of any trainer or adapter, whose it is and what has to be chosen for it."""
    kinds = [("trainer", name, TRAINER_CONFIGS[name]) for name in TRAINERS]
    kinds += [("method", name, ADAPTER_CONFIGS[name]) for name in METHODS]
    found: dict[str, tuple[str, str]] = {}
    for kind, name, config in kinds:
        for item in fields(config):
            found.setdefault(item.name, (config.__name__, f"{kind}: {name}"))
    return {name: owner for name, owner in found.items() if name not in _SET_BY_PEFT}


def _without(words: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """The words, less the options for some keys."""
    aliases = {key_of(alias): item.name for item in fields(RunArguments) for alias in item.metadata.get("aliases", ())}
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = aliases.get(key_of(word), key_of(word)) in keys
        if not dropping:
            kept.append(word)
    return kept


def resolved(plan: RunPlan) -> dict[str, Any]:
    """A plan as the keys of a config file, without those of the trainer and of LoRA that are at their defaults."""
    run = {name: value for name, value in vars(plan.run).items() if value is not None}
    output = {"output_dir": plan.training.output_dir}
    return run | adapter_settings(plan.adapter) | output | training_settings(plan.training)


def training_settings(training: Any) -> dict[str, Any]:
    """Fields of a trainer's config that differ from its defaults, without the folder that it writes to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said once already
        untouched = type(training)(output_dir=training.output_dir, use_cpu=training.use_cpu).to_dict()
    changed = {name: value for name, value in training.to_dict().items() if value != untouched[name]}
    return changed | ({"use_cpu": True} if training.use_cpu else {})


def adapter_settings(adapter: LoraConfig) -> dict[str, Any]:
    """Fields of `LoraConfig` that differ from their defaults, and all of this package's, as JSON has them."""
    own = adapter.option_rules() if isinstance(adapter, (MespConfig, SageConfig)) else ()
    untouched = type(adapter)()
    found: dict[str, Any] = {}
    for item in _adapter_fields(type(adapter)):
        value = getattr(adapter, item.name)
        if item.name in own or value != getattr(untouched, item.name):
            found[item.name] = (
                sorted(value) if isinstance(value, set) else list(value) if isinstance(value, tuple) else value
            )
    return found
