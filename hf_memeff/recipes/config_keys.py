"""Keys of a config file and command-line words, through TRL's parser, to dataclasses; errors in one line."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from hf_memeff.recipes.errors import RecipeError

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class KeyParser(TrlParser):
    """TRL's parser, whose complaints are one line instead of the usage of three hundred options."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"Got {message}, expected values that the fields can hold. Fix: change that field.")


def parse_keys(config: Path, words: Sequence[str], *classes: type[Any]) -> tuple[Any, ...]:
    """Read a config file of something that trains nothing, with some of its fields replaced.

    Args:
        config: YAML file; its keys are the fields of the classes.
        words: as for `parse_plan`.
        classes: dataclasses that argparse can fill; see `config_arguments` for others.

    Returns:
        An instance of each class.

    Raises:
        RecipeError: as `parse_plan`.
    """
    return parsed_keys(config, read_config(config), words, classes, " or ".join(kind.__name__ for kind in classes))


def config_arguments(config_class: type[Any], wanted: Sequence[dataclasses.Field[Any]]) -> type[Any]:
    """A class with some of a config's fields, each a YAML value or None: argparse has no unions.

    Args:
        config_class: any dataclass.
        wanted: those of its fields that a config file can hold.
    """
    arguments = []
    for item in wanted:
        text = str(item.metadata.get("help", "see PEFT")).replace("%", "%%")
        arguments.append((item.name, yaml_value, dataclasses.field(default=None, metadata={"help": text})))
    return make_dataclass(f"{config_class.__name__}Arguments", arguments)


def given_values(arguments: Any) -> dict[str, Any]:
    """The values of an instance of `config_arguments` that were given."""
    return {name: value for name, value in vars(arguments).items() if value is not None}


def parsed_keys(
    config: Path,
    content: Mapping[str, Any],
    words: Sequence[str],
    classes: Sequence[type[Any]],
    named: str,
    *,
    prog: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    others: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[Any, ...]:
    """Instances of the classes.

    Args:
        config: the file, for messages.
        content: what is in it.
        words: of the command line.
        classes: dataclasses whose fields are the keys.
        named: what the classes are, for messages.
        prog: name of the program in its help; None is the script's.
        defaults: values of fields that differ from their class's.
        others: by name, the owner of fields that are not there, and what would make them keys.

    Raises:
        RecipeError: a key is unknown, or a value is of the wrong type or range.
    """
    parser = KeyParser(list(classes), allow_abbrev=False, prog=prog)
    parser.set_defaults_with_config(**(defaults or {}))
    known = {action.dest: action for action in parser._actions}
    for key, value in content.items():
        if key != "env":
            _check_key(str(key), known, named, others or {}, f"key {key!r} in {config}")
            _check_type(str(key), value, known[key], config)
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in parser._option_string_actions:
            _check_key(key_of(word), known, named, others or {}, f"option {word}")
    _set_environment(content.get("env", {}), config)
    parser.set_defaults_with_config(**{key: value for key, value in content.items() if key != "env"})
    with explained(config, named):
        return tuple(parser.parse_args_into_dataclasses(list(words)))


def _set_environment(variables: Any, config: Path) -> None:
    if not isinstance(variables, Mapping):
        raise RecipeError(f"Got env: {variables!r} in {config}, expected names and values. Fix: env: {{NAME: value}}.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})


@contextmanager
def explained(config: Path, named: str) -> Iterator[None]:
    """Inside of a ``with`` block, say which file a value is from that a config's class refuses.

    Raises:
        RecipeError: instead of ValueError and TypeError.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(
            f"Got {config} with a value that does not fit ({error}), expected values of {named}. "
            "Fix: change that field in the file or on the command line."
        ) from error


def key_of(word: str) -> str:
    """The key that a command-line option such as ``--learning-rate=1`` is for."""
    return word[2:].split("=")[0].replace("-", "_")


def read_config(config: Path) -> dict[str, Any]:
    """The keys and values of a config file.

    Raises:
        RecipeError: the file is missing, or holds no mapping.
    """
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


def _check_key(key: str, known: dict[str, Any], named: str, others: Mapping[str, tuple[str, str]], where: str) -> None:
    if key in known:
        return
    if key in others:
        owner, choice = others[key]
        raise RecipeError(
            f"Got {where}, a field of {owner}, expected one of {named}. Fix: set {choice}, or leave it out."
        )
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    fix = f"did you mean {nearest[0]!r}?" if nearest else "--help lists all fields."
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
