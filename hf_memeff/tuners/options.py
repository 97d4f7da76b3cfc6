"""The fields that every config of this package adds to `LoraConfig`: how the engine runs, never what it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from hf_memeff.blocks.options import EngineOptions
from hf_memeff.tuners.rules import Rule, one_of

LARGEST_LOSS_TILE_BYTES = 2**40

LARGEST_MLP_TILE_TOKENS = 2**24
"""A larger tile is a mistake in units."""


def option(default: Any, rule: Rule, help: str) -> Any:
    """A config field with its default, what it may hold (in code and in a file), and text that helps a user choose."""
    return field(default=default, metadata={"help": help, "rule": rule})


def integer_or_none(largest: int) -> Rule:
    """A rule for a field that is None or an integer from 1 to `largest`."""
    return Rule(
        f"None or an integer from 1 to {largest}",
        lambda value: value is None or (type(value) is int and 0 < value <= largest),
    )


TRUE_OR_FALSE = Rule("True or False", lambda value: isinstance(value, bool))

_FOLDER = Rule(
    "None or the path of a folder",
    lambda value: value is None or (isinstance(value, str) and value != "" and "\0" not in value),
)


@dataclass(kw_only=True)
class MemeffOptions:
    """Engine options, the same in every config of this package and in `EngineOptions`; see each field's help."""

    activation_store: str = option(
        "memory",
        one_of("memory", "cpu", "disk"),
        "Where the block inputs wait for the backward pass: 'memory' (where they were computed, fastest), 'cpu' "
        "(pinned host memory, for a GPU that is full while the host is not) or 'disk' (a memory-mapped file, for "
        "long sequences on a small machine with a fast disk). All three give exactly the same gradients.",
    )
    activation_store_dir: str | None = option(
        None,
        _FOLDER,
        "Folder for activation_store='disk'; None means the user's cache folder. It needs room for one step's block "
        "inputs (layers x tokens x hidden size x bytes per element). Files in it are private to the user and vanish "
        "with the process. Never written to, nor read from, a saved adapter.",
    )
    tiled_loss: str = option(
        "auto",
        one_of("auto", "always", "never"),
        "Whether a call with labels computes its cross-entropy in tiles instead of building whole logits: 'auto' (in "
        "training only, so that evaluation keeps logits for compute_metrics), 'always' (evaluation too, for long "
        "evaluation batches) or 'never' (when training code reads outputs.logits).",
    )
    loss_tile_bytes: int | None = option(
        None,
        integer_or_none(LARGEST_LOSS_TILE_BYTES),
        "Bytes of logits alive at a time in the tiled loss. None means four block inputs, at least 1 MiB, which keeps "
        "the loss below the peak of the blocks. Larger gains little speed.",
    )
    mlp_tile_tokens: int | None = option(
        None,
        integer_or_none(LARGEST_MLP_TILE_TOKENS),
        "Tokens per tile when a block is re-run in the backward pass. None means a quarter of the step's tokens, at "
        "least 256. Smaller saves memory where the MLP is wide, and is slower below about 256.",
    )
    strict: bool = option(
        False,
        TRUE_OR_FALSE,
        "Raise when a block or linear can't take the memory-efficient path instead of running it correctly but with "
        "more memory. False reports it in memeff_status(model).",
    )

    def validate(self) -> None:
        """Check the fields of this package.

        Raises:
            ValueError: a value is outside its fixed list or range; says what was got, what is expected and how to fix
                it.
        """
        for name, rule in self.option_rules().items():
            value = getattr(self, name)
            if not rule.allows(value):
                default = type(self).__dataclass_fields__[name].default
                raise ValueError(
                    f"{type(self).__name__} got {name}={shorten(value)}, expected {rule.expected}. Fix: pass one of "
                    f"these, or leave it out for {default!r}."
                )
        if self.activation_store_dir is not None and self.activation_store != "disk":
            raise ValueError(
                f"{type(self).__name__} got activation_store_dir={shorten(self.activation_store_dir)} with "
                f"activation_store={self.activation_store!r}, expected None, since no folder is used. "
                "Fix: set activation_store='disk', or leave activation_store_dir out."
            )

    def engine_options(self) -> EngineOptions:
        """These fields as the engine takes them."""
        return EngineOptions(**{name: getattr(self, name) for name in MemeffOptions.option_rules()})

    @classmethod
    def option_rules(cls) -> dict[str, Rule]:
        """What each field of this package may hold, by name and in the fields' order; `LoraConfig`'s are left out."""
        return {item.name: item.metadata["rule"] for item in fields(cls) if "rule" in item.metadata}


def shorten(value: Any) -> str:
    """`repr` of a value from a user or a file, cut to a length that an error message can carry."""
    if isinstance(value, str) and len(value) > 80:
        return f"{value[:60]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + "..."
