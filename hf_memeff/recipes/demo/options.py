"""What the demo can be told and where it may write, checked before any work is done."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_memeff.benchmarks.comparison import METHODS

DEVICES = ("cuda", "mps", "cpu")

RECORD_NAME = "demo_result.json"
"""File that every run leaves in its output folder; a folder with it may be written to again."""

_ADAPTER_BYTES = 64 * 2**20
"""Room that the output folder must have at the start, several times what the adapter takes."""


class DemoError(ValueError):
    """An option that the demo cannot start with; the message says what was expected and the fix."""


@dataclass(frozen=True)
class DemoOptions:
    """What `hf-memeff demo` can be told.

    Attributes:
        steps: optimizer steps, at least 1.
        model: see `find_smollm2`; None is SmolLM2-135M-Instruct.
        method: one of `METHODS`.
        device: "cpu", "cuda" or "mps"; None takes the first of cuda, mps and cpu that this machine has.
        output: folder for the adapter; new, empty, or from an earlier demo.
        json_file: where to write the result as JSON besides the output folder.
        minutes: time limit of the whole run; training is shortened to keep it.
    """

    steps: int = 64
    model: str | None = None
    method: str = "mesp"
    device: str | None = None
    output: Path = Path("hf_memeff_demo")
    json_file: Path | None = None
    minutes: float = 10.0


def check_options(options: DemoOptions) -> str:
    """Refuse what could only fail after the training; creates the output folder.

    Args:
        options: see `DemoOptions`.

    Returns:
        The device to run on.

    Raises:
        DemoError: steps or minutes are out of range, the method or device is unknown or not there, the output folder
            or the JSON file cannot be written, or the folder holds something that is not an earlier demo's.
    """
    if options.steps < 1:
        raise DemoError(f"Got --steps {options.steps}, expected at least 1. Fix: leave it out for the default.")
    if not options.minutes > 0:
        raise DemoError(f"Got --minutes {options.minutes}, expected more than 0. Fix: leave it out for the default.")
    if options.method not in METHODS:
        raise DemoError(f"Got --method {options.method}, expected one of {', '.join(METHODS)}. Fix: pass one of these.")
    available = _available_devices()
    device = available[0] if options.device is None else options.device
    if device not in available:
        raise DemoError(
            f"Got --device {device}, expected one that PyTorch can use here: {', '.join(available)}. "
            "Fix: pass one of these, or install a build of PyTorch for that device."
        )
    output = options.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        _try_to_write(output)
        entries = [path.name for path in output.iterdir()]
        free_bytes = shutil.disk_usage(output).free
        if options.json_file is not None:
            if options.json_file.is_dir():
                raise IsADirectoryError(f"{options.json_file} is a folder")
            _try_to_write(options.json_file.parent)
    except OSError as error:
        raise DemoError(
            f"Got --output {output} and --json {options.json_file}, expected places that can be written to ({error}). "
            "Fix: choose others, or create the folder of the JSON file."
        ) from error
    if entries and RECORD_NAME not in entries:
        raise DemoError(
            f"Got --output {output}, which holds {sorted(entries)[0]!r} and is not from an earlier demo; expected a "
            "new or empty folder. Fix: choose another --output."
        )
    if free_bytes < _ADAPTER_BYTES:
        raise DemoError(
            f"Got --output {output} with {free_bytes / 2**20:.0f} MiB free, expected {_ADAPTER_BYTES / 2**20:.0f}. "
            "Fix: free some space, or choose another --output."
        )
    return device


def _available_devices() -> list[str]:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name in DEVICES if there[name]]


def _try_to_write(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=folder):
        pass


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a JSON file that is whole at any time.

    Args:
        content: what goes into it.
        path: the file; replaced if it exists.
    """
    text = json.dumps(content, indent=2)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)
