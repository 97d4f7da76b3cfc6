"""What each field of an adapter's JSON files may hold. Files come from strangers: a value is data of a known form, or
refused.

No rule lets a string name a module, a class or a file; free text is limited in length and kept as it is.
"""

from __future__ import annotations

import math
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union

from peft.tuners.lora import config as lora_config
from peft.utils import TaskType

TEXT_CHARACTERS = 512
"""Longest name, path or revision; file systems and the Hub stop at or below it."""

REGEX_CHARACTERS = 8192
"""Longest regular expression in target_modules, rank_pattern and their like."""

LARGEST_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Rule:
    """One field's rule.

    Attributes:
        expected: the allowed form in words, for the error message.
        allows: whether a JSON value has that form.
    """

    expected: str
    allows: Callable[[Any], bool]


def is_inert_text(value: Any) -> bool:
    """Whether a value is short printable text that is neither a URL nor a path that climbs out of its folder."""
    return _is_printable(value, TEXT_CHARACTERS) and ".." not in re.split(r"[/\\]", value)


def _is_regex(value: Any) -> bool:
    # A regular expression may well hold "\..", so here only "/" separates the parts of a path.
    return _is_printable(value, REGEX_CHARACTERS) and ".." not in value.split("/")


def _is_printable(value: Any, characters: int) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= characters:
        return False
    return value.isprintable() and "://" not in value and not value.startswith(("//", "\\\\"))


def _is_integer(value: Any, lowest: int = 0) -> bool:
    return type(value) is int and lowest <= value <= LARGEST_INTEGER


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= LARGEST_INTEGER


def _is_list(value: Any, item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(item(entry) for entry in value)


def _is_dict(value: Any, item: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(_is_regex(key) and item(entry) for key, entry in value.items())


def _is_auto_mapping(value: Any) -> bool:
    """PEFT's record of the base model's class. Dotted names, and none of Python's own modules; never imported here."""
    if not isinstance(value, dict) or set(value) != {"base_model_class", "parent_library"}:
        return False
    texts = value.values()
    if not all(is_inert_text(text) and all(part.isidentifier() for part in text.split(".")) for text in texts):
        return False
    return value["parent_library"].split(".")[0] not in sys.stdlib_module_names


def _is_initialisation(value: Any) -> bool:
    names = ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal", "lora_ga", "mica")
    if isinstance(value, str):
        return value in names or re.fullmatch(r"pissa_niter_\d{1,4}", value) is not None
    return isinstance(value, bool)


def _matches(hint: Any, value: Any) -> bool:
    """Whether a JSON value fits the annotation of a field of one of PEFT's nested configs; free text never does."""
    origin = typing.get_origin(hint)
    if origin in (Union, UnionType):
        return any(_matches(option, value) for option in typing.get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if origin is list:
        (item,) = typing.get_args(hint)
        return _is_list(value, is_inert_text if item is str else lambda entry: _matches(item, entry))
    if hint is float:
        return _is_number(value)
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST_INTEGER
    return value is None if hint is type(None) else hint is bool and isinstance(value, bool)


def _is_nested(value: Any, class_name: str) -> bool:
    """Whether a value is null or a dict of fields of PEFT's nested config `class_name` (which this PEFT may lack)."""
    if value is None:
        return True
    cls = getattr(lora_config, class_name, None)
    if not is_dataclass(cls) or not isinstance(value, dict):
        return False
    hints = typing.get_type_hints(cls)
    known = {item.name for item in fields(cls)}
    return all(key in known and _matches(hints[key], entry) for key, entry in value.items())


def _nullable(expected: str, allows: Callable[[Any], bool]) -> Rule:
    return Rule(f"null or {expected}", lambda value: value is None or allows(value))


def _nested(class_name: str) -> Rule:
    expected = f"null or an object with fields of peft's {class_name}, none of them a path"
    return Rule(expected, lambda value: _is_nested(value, class_name))


def one_of(*choices: str) -> Rule:
    """A rule for a field with a fixed list of strings."""
    return Rule("one of " + ", ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices)


_BOOL = Rule("true or false", lambda value: isinstance(value, bool))
_TEXT = _nullable(
    f"printable text of at most {TEXT_CHARACTERS} characters, no URL and no '..'",
    lambda value: value == "" or is_inert_text(value),  # peft 0.20 writes "" for a base model without a name
)
_NAMES = _nullable("a list of module names", lambda value: _is_list(value, is_inert_text))
_MODULES = _nullable(
    "a regular expression or a list of module names", lambda v: _is_regex(v) or _is_list(v, is_inert_text)
)
_INTEGERS = _nullable("a list of integers from 0", lambda value: _is_list(value, _is_integer))
VERSION = _nullable(
    "a version such as '0.21.2'",
    lambda value: isinstance(value, str) and re.fullmatch(r"\d[\w.+@-]{0,63}", value) is not None,
)

LORA_RULES: dict[str, Rule] = {
    "task_type": _nullable("one of " + ", ".join(TaskType), lambda v: isinstance(v, str) and v in set(TaskType)),
    "auto_mapping": _nullable("an object with base_model_class and parent_library, dotted names", _is_auto_mapping),
    "peft_version": VERSION,
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "inference_mode": _BOOL,
    "r": Rule("an integer above 0", lambda value: _is_integer(value, 1)),
    "target_modules": _MODULES,
    "exclude_modules": _MODULES,
    "lora_alpha": Rule("a finite number", _is_number),
    "lora_dropout": Rule("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "fan_in_fan_out": _BOOL,
    "bias": one_of("none", "all", "lora_only"),
    "use_rslora": _BOOL,
    "modules_to_save": _NAMES,
    "init_lora_weights": Rule("true, false or the name of one of PEFT's initialisations", _is_initialisation),
    "layers_to_transform": _nullable(
        "an integer or a list of them", lambda v: _is_integer(v) or _is_list(v, _is_integer)
    ),
    "layers_pattern": _MODULES,
    "rank_pattern": _nullable("an object of integers above 0", lambda v: _is_dict(v, lambda r: _is_integer(r, 1))),
    "alpha_pattern": _nullable("an object of finite numbers", lambda value: _is_dict(value, _is_number)),
    "megatron_config": Rule("null", lambda value: value is None),
    "megatron_core": _nullable("'megatron.core'", lambda value: value == "megatron.core"),
    "trainable_token_indices": _nullable(
        "a list of integers, or an object of such lists",
        lambda v: _is_list(v, _is_integer) or _is_dict(v, lambda ids: _is_list(ids, _is_integer)),
    ),
    "loftq_config": _nested("LoftQConfig"),
    "eva_config": _nested("EvaConfig"),
    "corda_config": _nested("CordaConfig"),
    "lora_ga_config": _nested("LoraGAConfig"),
    "use_dora": _BOOL,
    "velora_config": _nested("VeloraConfig"),
    "alora_invocation_tokens": _INTEGERS,
    "use_qalora": _BOOL,
    "qalora_group_size": Rule("an integer above 0", lambda value: _is_integer(value, 1)),
    "monteclora_config": _nested("MontecloraConfig"),
    "layer_replication": _nullable(
        "a list of [start, end] pairs",
        lambda value: _is_list(value, lambda pair: _is_list(pair, _is_integer) and len(pair) == 2),
    ),
    "lora_bias": _BOOL,
    "target_parameters": _NAMES,
    "use_bdlora": _nested("BdLoraConfig"),
    "arrow_config": _nested("ArrowConfig"),
    "kasa_config": _nested("KasaConfig"),
    "ensure_weight_tying": _BOOL,
}
"""Rules for adapter_config.json: every field of `LoraConfig` (peft 0.21) that PEFT writes, save `peft_type`."""
