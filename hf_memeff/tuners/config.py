"""`MemeffConfig`: what the configs of all methods share, the fields of `LoraConfig` and how the engine runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import LoraConfig
from peft.utils import PeftType

from hf_memeff.tuners.options import MemeffOptions, shorten
from hf_memeff.tuners.portable import card_note, put_card_note, put_card_tags, read_adapter, write_adapter
from hf_memeff.tuners.source import AdapterSource, refuse_pickle

REFUSED_VARIANTS = {
    "megatron_config": "Megatron's parallel layers run their own backward",
}
"""Fields of `LoraConfig` that the engine can't train with, and why. All others give LoRA's gradients."""


@dataclass
class MemeffConfig(MemeffOptions, LoraConfig):
    """Base of this package's configs: a LoRA adapter whose training runs through the memory-efficient engine.

    The adapter and its files are LoRA's. Every field of `LoraConfig` keeps its meaning and its place; the fields of
    this package are keyword-only, see `MemeffOptions`.

    Attributes:
        method: lower-case name of the method; in upper case it is the `PeftType`.
        title: the method's name in texts.
        promise: what the method is, for the model card.

    Raises:
        ValueError: a field is out of its range, or one of `REFUSED_VARIANTS` is set.
    """

    method: ClassVar[str]
    title: ClassVar[str]
    promise: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType(self.method.upper())
        if isinstance(self.activation_store_dir, os.PathLike):
            self.activation_store_dir = os.fspath(self.activation_store_dir)
        self.validate()
        for name, rank in {"r": self.r, **(self.rank_pattern or {})}.items():
            if not isinstance(rank, int) or rank <= 0:
                raise ValueError(
                    f"{type(self).__name__} got rank {shorten(rank)} for {name!r}, expected an integer above 0. "
                    "Fix: r=8 is a common start."
                )
        refuse_variants(self, self.title)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write `adapter_config.json`, a plain LoRA config, and `memeff_config.json` with this package's fields.

        A model card that PEFT has put into the folder gets a note on loading, and the method's tags.

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
        write_adapter(os.fspath(save_directory), fields, self, self.method)
        notes = {name: card_note(cls.title, cls.__name__, cls.promise) for name, cls in config_classes().items()}
        put_card_note(os.fspath(save_directory), notes[self.method], notes.values())
        put_card_tags(os.fspath(save_directory), self.tags())

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """What the method's adapters are tagged with; they are LoRA adapters, which PEFT says of its own type alone."""
        return "hf_memeff", cls.method, "lora"

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], subfolder: str | None = None, **kwargs: Any
    ) -> Self:
        """Read the config of a saved adapter, to train it on with this method.

        Any adapter of this package and any plain LoRA adapter will do, since the files of all are LoRA's. From one that
        another method of this package trained, the options that both methods have are taken; this method's own are at
        their defaults. Use it as `PeftModel.from_pretrained(base, folder, config=MespConfig.from_pretrained(folder),
        is_trainable=True)`; loading the folder without `config=` gives plain LoRA.

        Args:
            pretrained_model_name_or_path: folder, or id of a repository on the Hub.
            subfolder: folder inside it.
            kwargs: this package's options, in place of the file's, such as `token_budget`; and arguments for
                `huggingface_hub.hf_hub_download`, such as `revision`, `token`, `cache_dir`.

        Returns:
            The config, with defaults for what the files lack, and without the file's `activation_store_dir`.

        Raises:
            ValueError: a file is missing or breaks a rule (see `hf_memeff.tuners.rules`), the weights are a pickle, or
                an option in `kwargs` is out of its range.
        """
        source = AdapterSource.of(pretrained_model_name_or_path, subfolder, kwargs)
        rules = {name: known.option_rules() for name, known in config_classes().items()}
        values = read_adapter(source, cls.method, rules)
        refuse_pickle(source)
        return cls(**values | {name: kwargs[name] for name in rules[cls.method] if name in kwargs})


def config_classes() -> dict[str, type[MemeffConfig]]:
    """This package's configs by method, as registered with PEFT."""
    registered = PEFT_TYPE_TO_CONFIG_MAPPING.values()
    return {cls.method: cls for cls in registered if issubclass(cls, MemeffConfig)}


def refuse_variants(config: LoraConfig, title: str) -> None:
    """Refuse a LoRA config with one of `REFUSED_VARIANTS`.

    Args:
        config: the config of an adapter.
        title: name of the method that is to train it, for the message.

    Raises:
        ValueError: such a field is set.
    """
    for name, reason in REFUSED_VARIANTS.items():
        if getattr(config, name) is not None:
            raise ValueError(
                f"{title} got {name}, expected None: {reason}. Fix: train this adapter with LoraConfig alone."
            )
