"""A YAML file and command-line words, through TRL's parser, to the configs of run, trainer and adapter."""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from peft import LoraConfig
from trl import DPOConfig, SFTConfig, TrlParser

from hf_memeff.recipes.arguments import METHODS, TRAINERS, RunArguments
from hf_memeff.recipes.errors import RecipeError
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
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class RunPlan:
    """A config, resolved.

    Attributes:
        run: model, data and judging.
        training: the trainer's `SFTConfig` or `DPOConfig`.
        adapter: the adapter's `MespConfig`, `SageConfig` or `LoraConfig`.
    """

    run: RunArguments
    training: Any
    adapter: LoraConfig


def parse_plan(config: Path, words: Sequence[str] = ()) -> RunPlan:
    """Read a config file, with some of its fields replaced.

    Args:
        config: YAML file; its keys are fields of `RunArguments`, of the trainer's config, of the adapter's config, and
            `env`, TRL's mapping of environment variables.
        words: command-line words such as ``--learning_rate 1e-4``; they win over the file.

    Returns:
        The plan. Without an accelerator ``use_cpu`` is on, unless it was given.

    Raises:
        RecipeError: the file is missing or no mapping, a key is unknown, or a value is of the wrong type or range.
    """
    content = _read(config)
    kinds = _Parser(_Kinds, allow_abbrev=False, add_help=False)
    kinds.set_defaults_with_config(**{name: content[name] for name in ("trainer", "method") if name in content})
    chosen = kinds.parse_args_into_dataclasses(list(words), return_remaining_strings=True)[0]
    RunArguments(trainer=chosen.trainer, method=chosen.method)  # refuses what is neither
    trainer, method = TRAINER_CONFIGS[chosen.trainer], ADAPTER_CONFIGS[chosen.method]
    parser = _Parser([RunArguments, trainer, _adapter_arguments(method)], allow_abbrev=False, prog="hf-memeff finetune")
    if not torch.accelerator.is_available():
        parser.set_defaults_with_config(use_cpu=True)
    known = {action.dest: action for action in parser._actions}
    for key, value in content.items():
        if key != "env":
            _check_key(str(key), known, trainer, method, f"key {key!r} in {config}")
            _check_type(str(key), value, known[key], config)
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in parser._option_string_actions:
            _check_key(word[2:].split("=")[0].replace("-", "_"), known, trainer, method, f"option {word}")
    try:
        parsed = parser.parse_args_and_config([*(["--config", str(config)] if content else []), *words])
        given = {name: value for name, value in vars(parsed[2]).items() if value is not None}
        adapter = method(task_type="CAUSAL_LM", **given)
    except (ValueError, TypeError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(
            f"Got {config} with a value that does not fit ({error}), expected values of {trainer.__name__} and "
            f"{method.__name__}. Fix: change that field in the file or on the command line."
        ) from error
    return RunPlan(parsed[0], parsed[1], adapter)


class _Parser(TrlParser):
    """TRL's parser, whose complaints are one line instead of the usage of three hundred options."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"Got {message}, expected values that the fields can hold. Fix: change that field.")


@dataclass
class _Kinds:
    trainer: str = "sft"
    method: str = "mesp"


def _read(config: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(
            f"Got no config {config} ({error.strerror}), expected a YAML file. Fix: check the path; the folder "
            "examples has configs to start from."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"Got {config} with no YAML ({reason}), expected one key per line. Fix: mend it.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeError(f"Got {config} with a {type(content).__name__}, expected keys and values. Fix: key: value.")
    return content


def yaml_value(text: str) -> Any:
    """What a command-line word would be as a value in YAML; ``1e-4``, which YAML 1.1 takes for text, is a number."""
    value = yaml.safe_load(text)
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _adapter_fields(config_class: type[Any]) -> list[dataclasses.Field[Any]]:
    """Fields that a config file can hold: one value each, and not what PEFT fills in by itself."""
    return [f for f in fields(config_class) if f.init and f.name not in _SET_BY_PEFT and not f.name.endswith("_config")]


def _adapter_arguments(config_class: type[Any]) -> type[Any]:
    """A class with the config's fields, each a YAML value: argparse has no unions, of which PEFT's fields are full."""
    arguments = []
    for item in _adapter_fields(config_class):
        text = str(item.metadata.get("help", "see PEFT")).replace("%", "%%")
        arguments.append((item.name, yaml_value, dataclasses.field(default=None, metadata={"help": text})))
    return make_dataclass(f"{config_class.__name__}Arguments", arguments)


def _check_key(key: str, known: dict[str, Any], trainer: type, method: type, where: str) -> None:
    if key in known:
        return
    named = f"{trainer.__name__}, {method.__name__} or the run's own"
    for kind, name, config in [
        *(("trainer", name, TRAINER_CONFIGS[name]) for name in TRAINERS),
        *(("method", name, ADAPTER_CONFIGS[name]) for name in METHODS),
    ]:
        if key in {item.name for item in fields(config)} - _SET_BY_PEFT:
            raise RecipeError(
                f"Got {where}, a field of {config.__name__}, expected one of {named}. "
                f"Fix: set {kind}: {name}, or leave it out."
            )
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    fix = f"did you mean {nearest[0]!r}?" if nearest else "hf-memeff finetune CONFIG --help lists all fields."
    raise RecipeError(f"Got {where}, expected a field of {named}. Fix: {fix}")


def _check_type(key: str, value: Any, action: Any, config: Path) -> None:
    """Refuse what argparse lets through: it converts defaults that are text and takes all others as they are."""
    if isinstance(value, str) or value is None or action.type is yaml_value:
        return
    expected = getattr(action.type, "__name__", "")
    if action.nargs == "+":
        fits, expected = isinstance(value, list), "a list"
    elif expected == "int":
        fits = type(value) is int
    elif expected == "float":
        fits = type(value) in (int, float)
    elif expected == "string_to_bool":
        fits, expected = isinstance(value, bool), "true or false"
    elif expected == "str":
        # TRL and transformers mark fields that also hold numbers or mappings as text
        fits = not isinstance(value, list)
    else:
        return
    if not fits:
        raise RecipeError(
            f"Got {key}: {value!r} in {config}, expected {expected}. Fix: change the value, or leave the key out."
        )


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
