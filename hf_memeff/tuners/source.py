"""Where a saved adapter lies: a local folder or a repository on the Hub. No file of it is opened here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME


@dataclass(frozen=True)
class AdapterSource:
    """A folder or Hub repository that holds an adapter.

    Attributes:
        name: path of a folder, or id of a repository on the Hub.
        subfolder: folder inside it, or None.
        hub_options: arguments for `huggingface_hub.hf_hub_download`, such as `revision`, `token`, `cache_dir`.
    """

    name: str
    subfolder: str | None
    hub_options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str | os.PathLike[str], subfolder: str | None, options: Mapping[str, Any]) -> AdapterSource:
        """Keep those of `options` that downloading takes; PEFT passes others along, such as `ephemeral_gpu_offload`."""
        known = inspect.signature(huggingface_hub.hf_hub_download).parameters
        return cls(os.fspath(name), subfolder, {key: value for key, value in options.items() if key in known})

    @property
    def folder(self) -> str | None:
        """The local folder, or None if the adapter lies on the Hub."""
        path = os.path.join(self.name, self.subfolder) if self.subfolder is not None else self.name
        return path if os.path.isdir(path) else None

    def find(self, filename: str) -> str | None:
        """Path of a file of the adapter, downloaded if it lies on the Hub; None if the adapter has no such file."""
        if self.folder is not None:
            path = os.path.join(self.folder, filename)
            return path if os.path.isfile(path) else None
        try:
            return huggingface_hub.hf_hub_download(self.name, filename, subfolder=self.subfolder, **self.hub_options)
        except EntryNotFoundError:
            return None


def refuse_pickle(source: AdapterSource) -> None:
    """Refuse an adapter whose weights PEFT could only read by unpickling.

    Raises:
        ValueError: there is an adapter_model.bin and no adapter_model.safetensors.
    """
    if source.folder is not None:
        names = os.listdir(source.folder)
    elif huggingface_hub.constants.HF_HUB_OFFLINE:
        return  # only what was cached can be loaded, and listing needs the network
    else:
        options = {key: source.hub_options[key] for key in ("revision", "token") if key in source.hub_options}
        prefix = f"{source.subfolder}/" if source.subfolder else ""
        files = huggingface_hub.HfApi().list_repo_files(source.name, **options)
        names = [name.removeprefix(prefix) for name in files]
    if WEIGHTS_NAME in names and SAFETENSORS_WEIGHTS_NAME not in names:
        raise ValueError(
            f"got {WEIGHTS_NAME} (a pickle, which can run code when it is read) in {source.name!r}, expected "
            f"{SAFETENSORS_WEIGHTS_NAME}. Fix: ask its author for safetensors, or, if you trust the file, load it "
            "with stock PEFT and save it again."
        )
