"""An adapter's JSON files: a plain LoRA `adapter_config.json` and, beside it, our settings in `memeff_config.json`.

Stock PEFT, vLLM and converters read the first and never look at the second. Reading treats both as data from a
stranger: JSON of limited size, every field checked, nothing imported, and no field used as a path.
"""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub import ModelCard
from peft.tuners.lora import LoraConfig
from peft.utils import CONFIG_NAME

from hf_memeff.compat import PACKAGE_VERSION
from hf_memeff.tuners.options import MemeffOptions, shorten
from hf_memeff.tuners.rules import LORA_RULES, VERSION, Rule, is_inert_text, one_of
from hf_memeff.tuners.source import AdapterSource

OPTIONS_NAME = "memeff_config.json"

CARD_NAME = "README.md"

_CARD_NOTE = """
## Training on with {title}

This adapter was trained with {title} of hf_memeff: {promise}.
Its files are plain LoRA. Loading them without `config=` gives plain LoRA, in any library that reads LoRA adapters.
To train on with {title}:

```python
from hf_memeff import {config}
from peft import PeftModel

config = {config}.from_pretrained(adapter)
model = PeftModel.from_pretrained(base_model, adapter, config=config, is_trainable=True)
```
"""

LARGEST_FILE_BYTES = 2**20
"""Configs of real adapters take a few kB; reading stops here."""


def read_adapter(source: AdapterSource, method: str, rules: Mapping[str, Mapping[str, Rule]]) -> dict[str, Any]:
    """Read and check both files of an adapter.

    Args:
        source: where they are. `memeff_config.json` may be missing: any plain LoRA adapter can be trained on.
        method: the method that is to train the adapter on, such as "mesp".
        rules: for each method that memeff_config.json may name, its options and what each may hold.

    Returns:
        Keyword arguments for the method's config. Fields that the files lack are left out, and options that another
        method wrote for itself.

    Raises:
        ValueError: a file is missing, too large or not JSON; a field breaks its rule; or a field is unknown and not
            empty.
    """
    path = source.find(CONFIG_NAME)
    if path is None:
        raise ValueError(
            f"got no {CONFIG_NAME} in {source.name!r}, expected the folder or repository of a saved LoRA adapter. "
            "Fix: check the name, or pass subfolder=."
        )
    lora = _read_json(path)
    peft_type = lora.pop("peft_type", None)
    _check(CONFIG_NAME, "peft_type", peft_type, one_of("LORA", method.upper()))
    known = {item.name for item in fields(LoraConfig)}
    values, unknown = _split(CONFIG_NAME, lora, {name: rule for name, rule in LORA_RULES.items() if name in known})
    values.pop("auto_mapping", None)  # PEFT works it out again when it saves; a stranger's has no further use

    path = source.find(OPTIONS_NAME)
    if path is not None:
        written = _read_json(path)
        writer = written.pop("method", method)
        _check(OPTIONS_NAME, "method", writer, one_of(*rules))
        options, more_unknown = _split(OPTIONS_NAME, written, _file_rules(rules[writer]))
        unknown += more_unknown
        values.update({name: value for name, value in options.items() if name in rules[method]})
    if unknown:
        warnings.warn(
            f"{source.name!r} holds fields unknown to the installed versions of peft and hf_memeff, ignored because "
            f"they are empty: {', '.join(unknown)}. A newer version may have written them.",
            stacklevel=3,
        )
    return values


def write_adapter(folder: str, lora: Mapping[str, Any], options: MemeffOptions, method: str) -> None:
    """Write both files, each at once: a reader or a crash meets the old file or the new one, never a part.

    Args:
        folder: an existing folder.
        lora: fields of the config; those that `LoraConfig` has and saves are written, with `peft_type` "LORA".
        options: our settings. `activation_store_dir` stays out: it is a path of this machine.
        method: such as "mesp".
    """
    plain = {item.name: lora[item.name] for item in fields(LoraConfig) if item.name in lora}
    plain.pop("runtime_config", None)  # holds for one process, as in PEFT
    plain["peft_type"] = "LORA"
    base = plain.get("base_model_name_or_path")
    if isinstance(base, str) and not is_inert_text(base) and os.path.isdir(base):
        plain["base_model_name_or_path"] = os.path.abspath(base)  # "../model" would point elsewhere for the next reader
    ours = {name: getattr(options, name) for name in options.option_rules() if name != "activation_store_dir"}
    write_json(os.path.join(folder, OPTIONS_NAME), {"method": method, "hf_memeff_version": PACKAGE_VERSION, **ours})
    write_json(os.path.join(folder, CONFIG_NAME), plain)


def card_note(title: str, config: str, promise: str) -> str:
    """What a model card says of a method: how to load the adapter and train it on.

    Args:
        title: the method's name.
        config: name of its config class.
        promise: what the method is, in a few words.
    """
    return _CARD_NOTE.format(title=title, config=config, promise=promise)


def put_card_note(folder: str, note: str, notes: Iterable[str]) -> None:
    """Put a note into the model card, if PEFT has written one into the folder, in place of an earlier one.

    Args:
        folder: the adapter's folder.
        note: what the card is to say.
        notes: the notes of all methods; one of another method is taken out.
    """
    path = os.path.join(folder, CARD_NAME)
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8") as file:
        card = file.read()
    if note.strip() in card:
        return
    for other in notes:
        card = card.replace(other.strip(), "")
    write_text(path, card.rstrip("\n") + "\n" + note)


def put_card_tags(folder: str, tags: Iterable[str]) -> None:
    """Add tags to the model card, if PEFT has written one into the folder.

    The Hub knows an adapter as LoRA by the tag "lora", which PEFT gives to its own type alone.

    Args:
        folder: the adapter's folder.
        tags: what the card's metadata is to hold; tags that are there stay.
    """
    path = os.path.join(folder, CARD_NAME)
    if not os.path.isfile(path):
        return
    card = ModelCard.load(path)
    before = set(card.data.get("tags") or ())
    if not before.issuperset(tags):
        card.data["tags"] = sorted(before.union(tags))
        write_text(path, str(card))


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """Write an object as JSON with sorted keys, replacing the file in one step."""
    write_text(path, json.dumps(data, indent=2, sort_keys=True, default=_plain))


def write_text(path: str, text: str) -> None:
    """Write a file by replacing it in one step, with the permissions that any new file gets."""
    draft = f"{path}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.remove(draft)
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"got {shorten(value)} in a config, expected what JSON can hold. Fix: pass numbers, text or lists.")


def _read_json(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        raw = file.read(LARGEST_FILE_BYTES + 1)
    name = os.path.basename(path)
    if len(raw) > LARGEST_FILE_BYTES:
        raise ValueError(
            f"{name}: got more than {LARGEST_FILE_BYTES} bytes, expected a config of a few kB. Fix: get the file "
            "from its author again."
        )
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: got {error}, expected JSON. Fix: get the file from its author again.") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"{name}: got {shorten(data)}, expected a JSON object. Fix: get the file from its author again."
        )
    return data


def _file_rules(options: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules for the rest of memeff_config.json. `activation_store_dir` has to be null: no path comes from a file."""
    no_path = Rule("null (no path comes from a file; pass it in code)", lambda value: value is None)
    return {**options, "hf_memeff_version": VERSION, "activation_store_dir": no_path}


def _split(filename: str, data: dict[str, Any], rules: Mapping[str, Rule]) -> tuple[dict[str, Any], list[str]]:
    """Check the fields that have a rule and return them, with the names of the others, which have to be empty."""
    unknown = sorted(set(data) - set(rules))
    for name in unknown:
        if data[name] is not None and data[name] is not False and data[name] not in ("", [], {}):
            raise ValueError(
                f"{filename}: got {shorten(name)}: {shorten(data[name])}, a field unknown to the installed versions "
                "of peft and hf_memeff that may change the result; expected only known or empty fields. Fix: pip "
                "install -U peft hf_memeff."
            )
    values = {name: value for name, value in data.items() if name in rules}
    for name, value in values.items():
        _check(filename, name, value, rules[name])
    return values, [shorten(name) for name in unknown]


def _check(filename: str, name: str, value: Any, rule: Rule) -> None:
    if not rule.allows(value):
        raise ValueError(
            f"{filename}: got {name}={shorten(value)}, expected {rule.expected}. Fix: correct the file, or get it "
            "from its author again."
        )
