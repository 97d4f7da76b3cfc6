"""`MespConfig`: the fields of `LoraConfig` and how the engine runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraConfig
from peft.utils import PeftType

from hf_memeff.tuners.options import MemeffOptions, shorten
from hf_memeff.tuners.portable import add_card_note, read_adapter, write_adapter
from hf_memeff.tuners.source import AdapterSource, refuse_pickle

METHOD = "mesp"

REFUSED_VARIANTS = {
    "megatron_config": "Megatron's parallel layers run their own backward",
    "monteclora_config": "MonteCLoRA draws new samples whenever a layer runs, so a block run again gives others",
}
"""Fields of `LoraConfig` that can't be trained by re-running blocks, and why. All others give LoRA's gradients."""


@dataclass
class MespConfig(MemeffOptions, LoraConfig):
    """Config of a LoRA adapter that trains with memory-efficient structured backpropagation.

    The adapter, its gradients and its files are LoRA's; only the memory its training takes differs. Every field of
    `LoraConfig` keeps its meaning and its place; the fields of this package are keyword-only, see `MemeffOptions`.
    Source: "Memory-Efficient Structured Backpropagation for On-Device LLM Fine-Tuning", arXiv 2602.13069.

    Raises:
        ValueError: a field is out of its range, or one of `REFUSED_VARIANTS` is set.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.MESP
        if isinstance(self.activation_store_dir, os.PathLike):
            self.activation_store_dir = os.fspath(self.activation_store_dir)
        self.validate()
        for name, rank in {"r": self.r, **(self.rank_pattern or {})}.items():
            if not isinstance(rank, int) or rank <= 0:
                raise ValueError(
                    f"MespConfig got rank {shorten(rank)} for {name!r}, expected an integer above 0. Fix: r=8 is a "
                    "common start."
                )
        refuse_variants(self)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write `adapter_config.json`, a plain LoRA config, and `memeff_config.json` with this package's fields.

        A model card that PEFT has put into the folder gets a note on loading.

        Args:
            save_directory: folder, created if missing.
            kwargs: `auto_mapping_dict` as PEFT passes it (class and module of a base model without task type).

        Raises:
            ValueError: `save_directory` is a file.
        """
        if os.path.isfile(save_directory):
            raise ValueError(f"got the file {save_directory!r}, expected a folder. Fix: pass the folder to save into.")
        os.makedirs(save_directory, exist_ok=True)
        fields = self.to_dict()
        if kwargs.get("auto_mapping_dict") is not None:
            fields["auto_mapping"] = kwargs["auto_mapping_dict"]
        write_adapter(os.fspath(save_directory), fields, self, METHOD)
        add_card_note(os.fspath(save_directory))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], subfolder: str | None = None, **kwargs: Any
    ) -> MespConfig:
        """Read the config of a saved adapter, to train it on; a plain LoRA adapter will do.

        Use it as `PeftModel.from_pretrained(base, folder, config=MespConfig.from_pretrained(folder),
        is_trainable=True)`; loading the folder without `config=` gives plain LoRA.

        Args:
            pretrained_model_name_or_path: folder, or id of a repository on the Hub.
            subfolder: folder inside it.
            kwargs: arguments for `huggingface_hub.hf_hub_download`, such as `revision`, `token`, `cache_dir`.

        Returns:
            The config, with defaults for what the files lack, and without `activation_store_dir`.

        Raises:
            ValueError: a file is missing or breaks a rule (see `hf_memeff.tuners.rules`), or the weights are a pickle.
        """
        source = AdapterSource.of(pretrained_model_name_or_path, subfolder, kwargs)
        values = read_adapter(source, METHOD)
        refuse_pickle(source)
        return cls(**values)


def refuse_variants(config: LoraConfig) -> None:
    """Refuse a LoRA config with one of `REFUSED_VARIANTS`.

    Raises:
        ValueError: such a field is set.
    """
    for name, reason in REFUSED_VARIANTS.items():
        if getattr(config, name) is not None:
            raise ValueError(
                f"MeSP got {name}, expected None: {reason}. Fix: train this adapter with LoraConfig alone."
            )
