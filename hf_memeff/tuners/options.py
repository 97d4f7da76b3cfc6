"""The fields that every config of this package adds to `LoraConfig`: how the engine runs, never what it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from hf_memeff.blocks.options import EngineOptions

CHOICES: dict[str, tuple[str, ...]] = {
    "activation_store": ("memory", "cpu", "disk"),
    "tiled_loss": ("auto", "always", "never"),
}

LARGEST: dict[str, int] = {"loss_tile_bytes": 2**40, "mlp_tile_tokens": 2**24}
"""Upper ends of the integer fields: a larger value is a mistake in units."""


@dataclass(kw_only=True)
class MemeffOptions:
    """Engine options, the same in every config of this package and in `EngineOptions`; see each field's help."""

    activation_store: str = field(
        default="memory",
        metadata={
            "help": (
                "Where the block inputs wait for the backward pass: 'memory' (where they were computed, fastest), "
                "'cpu' (pinned host memory, for a GPU that is full while the host is not) or 'disk' (a "
                "memory-mapped file, for long sequences on a small machine with a fast disk). All three give "
                "exactly the same gradients."
            )
        },
    )
    activation_store_dir: str | None = field(
        default=None,
        metadata={
            "help": (
                "Folder for activation_store='disk'; None means the user's cache folder. It needs room for one "
                "step's block inputs (layers x tokens x hidden size x bytes per element). Files in it are private "
                "to the user and vanish with the process. Never written to, nor read from, a saved adapter."
            )
        },
    )
    tiled_loss: str = field(
        default="auto",
        metadata={
            "help": (
                "Whether a call with labels computes its cross-entropy in tiles instead of building whole logits: "
                "'auto' (in training only, so that evaluation keeps logits for compute_metrics), 'always' "
                "(evaluation too, for long evaluation batches) or 'never' (when training code reads outputs.logits)."
            )
        },
    )
    loss_tile_bytes: int | None = field(
        default=None,
        metadata={
            "help": (
                "Bytes of logits alive at a time in the tiled loss. None means four block inputs, at least 1 MiB, "
                "which keeps the loss below the peak of the blocks. Larger gains little speed."
            )
        },
    )
    mlp_tile_tokens: int | None = field(
        default=None,
        metadata={
            "help": (
                "Tokens per tile when a block is re-run in the backward pass. None means a quarter of the step's "
                "tokens, at least 256. Smaller saves memory where the MLP is wide, and is slower below about 256."
            )
        },
    )
    strict: bool = field(
        default=False,
        metadata={
            "help": (
                "Raise when a block or linear can't take the memory-efficient path instead of running it correctly "
                "but with more memory. False reports it in memeff_status(model)."
            )
        },
    )

    def validate(self) -> None:
        """Check the fields of this class.

        Raises:
            ValueError: a value is outside its fixed list or range; says what was got, what is expected and how to fix
                it.
        """
        for name in option_names():
            problem = option_problem(name, getattr(self, name))
            if problem is not None:
                raise ValueError(f"{type(self).__name__} {problem}")
        if self.activation_store_dir is not None and self.activation_store != "disk":
            raise ValueError(
                f"{type(self).__name__} got activation_store_dir={shorten(self.activation_store_dir)} with "
                f"activation_store={self.activation_store!r}, expected None, since no folder is used. "
                "Fix: set activation_store='disk', or leave activation_store_dir out."
            )

    def engine_options(self) -> EngineOptions:
        """These fields as the engine takes them."""
        return EngineOptions(**{name: getattr(self, name) for name in option_names()})


def option_names() -> tuple[str, ...]:
    """Names of the engine's fields, in their order."""
    return tuple(item.name for item in fields(MemeffOptions))


def option_problem(name: str, value: Any) -> str | None:
    """What is wrong with a value for the field `name` of `MemeffOptions`, as "got ... expected ... fix", or None."""
    if name in CHOICES:
        expected = "one of " + ", ".join(map(repr, CHOICES[name]))
        fine = isinstance(value, str) and value in CHOICES[name]
    elif name in LARGEST:
        expected = f"None or an integer from 1 to {LARGEST[name]}"
        fine = value is None or (type(value) is int and 0 < value <= LARGEST[name])
    elif name == "strict":
        expected = "True or False"
        fine = isinstance(value, bool)
    else:
        expected = "None or the path of a folder"
        fine = value is None or (isinstance(value, str) and value != "" and "\0" not in value)
    if fine:
        return None
    default = MemeffOptions.__dataclass_fields__[name].default
    return f"got {name}={shorten(value)}, expected {expected}. Fix: pass one of these, or leave it out for {default!r}."


def shorten(value: Any) -> str:
    """`repr` of a value from a user or a file, cut to a length that an error message can carry."""
    if isinstance(value, str) and len(value) > 80:
        return f"{value[:60]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + "..."
