"""An adapter's folder as it is published: which files, that they agree with the run, and no place of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from hf_memeff.recipes.card_fields import CardError, CardFields, wrong
from hf_memeff.recipes.card_paths import is_local_path, local_paths
from hf_memeff.recipes.results import RESULTS_NAME, RunResult
from hf_memeff.tuners.options import shorten
from hf_memeff.tuners.portable import CARD_NAME, OPTIONS_NAME
from hf_memeff.tuners.source import AdapterSource, refuse_pickle

_CONFIGS = (CONFIG_NAME, OPTIONS_NAME, RESULTS_NAME, "results.*.json")
_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
PUBLISHED = (CARD_NAME, SAFETENSORS_WEIGHTS_NAME, "learning_curve.svg", *_CONFIGS, *_TOKENIZER, *_VOCABULARY)
"""Names, and patterns of names, of the files that go to the Hub; no other does, a pickle least of all."""


def published_files(folder: Path) -> list[Path]:
    """The files of an adapter's folder that go to the Hub, in order of names; subfolders do not."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(fnmatchcase(path.name, pattern) for pattern in PUBLISHED)]


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json` of a folder that holds a whole adapter.

    Raises:
        CardError: there is none, or its weights are missing or a pickle.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise CardError(
            f"Got no {CONFIG_NAME} in {folder}, expected the folder of a trained adapter. Fix: name the output_dir of "
            "hf-memeff finetune."
        )
    try:
        refuse_pickle(AdapterSource(str(folder), None, {}))
        with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, "pt") as weights:
            weights.keys()
    except (SafetensorError, OSError) as error:
        raise CardError(
            f"Got no readable {SAFETENSORS_WEIGHTS_NAME} in {folder} ({error}), expected the adapter's weights in "
            "safetensors. Fix: save the adapter again."
        ) from error
    except ValueError as error:
        raise CardError(str(error)) from error
    return _read_object(folder / CONFIG_NAME)


def check_agreement(folder: Path, adapter: dict[str, Any], run: RunResult) -> None:
    """Refuse a results file that belongs to another adapter than the one in the folder.

    Args:
        folder: the adapter's folder.
        adapter: its `adapter_config.json`.
        run: its results.

    Raises:
        CardError: a rank, a scale, the method or one of its options differ.
    """
    for name in ("r", "lora_alpha"):
        if name in run.settings and adapter.get(name) != run.settings[name]:
            raise _disagreement(CONFIG_NAME, name, adapter.get(name), run.settings[name])
    if run.method == "lora":
        return
    if not (folder / OPTIONS_NAME).is_file():
        raise CardError(f"Got no {OPTIONS_NAME} in {folder}, expected it. Fix: save the adapter again.")
    options = _read_object(folder / OPTIONS_NAME)
    expected = {"method": run.method, **{k: v for k, v in run.settings.items() if k in options}}
    for name, value in expected.items():
        if options.get(name) != value:
            raise _disagreement(OPTIONS_NAME, name, options.get(name), value)


def without_local_base(adapter: dict[str, Any], fields: CardFields) -> dict[str, Any]:
    """An adapter's config that names its base model as the Hub does.

    Args:
        adapter: content of `adapter_config.json`.
        fields: the card's fields.

    Returns:
        The content, changed where it named a folder of this machine or nothing.

    Raises:
        CardError: it names another model of the Hub.
    """
    named = adapter.get("base_model_name_or_path")
    if named == fields.base_model:
        return adapter
    if isinstance(named, str) and named and "/" in named and not is_local_path(named):
        raise wrong("base_model", fields.base_model, f"{named!r} as in {CONFIG_NAME}", "correct the one that is wrong")
    return {**adapter, "base_model_name_or_path": fields.base_model}


def refuse_local_paths(name: str, text: str) -> None:
    """Refuse a text file that names a place on this machine.

    Args:
        name: the file's name, which says how it is read.
        text: its content.

    Raises:
        CardError: it does.
    """
    if name in _VOCABULARY:
        return  # pieces of text that a tokenizer has learned, "/usr/bin" perhaps among them
    found = local_paths(text)
    if any(fnmatchcase(name, pattern) for pattern in _CONFIGS):
        found += [value for value in _strings(json.loads(text)) if is_local_path(value)]
    if found:
        raise CardError(
            f"Got {shorten(found[0])} in {name}, expected no path of this machine in a file that is published. Fix: "
            "put the Hub id in its place, or take it out."
        )


def refuse_unpublishable(folder: Path, besides: Sequence[str] = ()) -> None:
    """Refuse a folder with a local path in a file that would go to the Hub, weights' metadata included.

    Args:
        folder: the adapter's folder.
        besides: names of files that are not looked at.

    Raises:
        CardError: see `refuse_local_paths`.
    """
    for path in published_files(folder):
        if path.name in besides:
            continue
        if path.name == SAFETENSORS_WEIGHTS_NAME:
            with safe_open(path, "pt") as weights:
                refuse_local_paths(path.name, json.dumps(weights.metadata() or {}))
        elif path.name not in _VOCABULARY:
            refuse_local_paths(path.name, path.read_text(encoding="utf-8"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _strings(entry)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CardError(f"Got {path} with no JSON ({error}), expected it. Fix: save the adapter again.") from error
    if not isinstance(content, dict):
        raise CardError(f"Got {shorten(content)} in {path}, expected a JSON object. Fix: save the adapter again.")
    return content


def _disagreement(filename: str, name: str, got: Any, expected: Any) -> CardError:
    return CardError(
        f"Got {name}={shorten(got)} in {filename}, expected {shorten(expected)} as in {RESULTS_NAME}. Fix: put the "
        "results of the run that trained this adapter beside it."
    )
