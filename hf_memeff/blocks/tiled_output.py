"""Model outputs of a tiled step: like the model's own, but reading the logits is an error instead of a wrong value."""

from __future__ import annotations

import dataclasses
from typing import Any

_MESSAGE = (
    "got a read of outputs.logits, expected none in a training step whose loss is computed in tiles: its logits never "
    'exist. Set tiled_loss="never" in the config to have them (at the cost of their memory), or read them in '
    "evaluation mode."
)


class LogitsNotComputedError(RuntimeError):
    """The logits of a tiled training step were read."""


_classes: dict[type, type] = {}


def without_logits(output: Any) -> Any:
    """The output without its logits.

    Args:
        output: a transformers ``ModelOutput``.

    Returns:
        An instance of a subclass of the output's class whose ``logits`` raise ``LogitsNotComputedError``.
    """
    cls = type(output)
    if cls not in _classes:
        _classes[cls] = _subclass(cls)
    values = {f.name: getattr(output, f.name) for f in dataclasses.fields(output) if f.name != "logits"}
    return _classes[cls](**values)


def _subclass(cls: type) -> type:
    def post_init(self: Any) -> None:
        parent.__post_init__(self)
        self.__dict__["_logits_refused"] = True

    def getattribute(self: Any, name: str) -> Any:
        if name == "logits" and object.__getattribute__(self, "__dict__").get("_logits_refused"):
            raise LogitsNotComputedError(_MESSAGE)
        return parent.__getattribute__(self, name)

    def getitem(self: Any, key: Any) -> Any:
        if key == "logits":
            raise LogitsNotComputedError(_MESSAGE)
        return parent.__getitem__(self, key)

    def representation(self: Any) -> str:
        return f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    parent: Any = cls
    # DDP and FSDP walk an output's dataclass fields to find its tensors: without the field they do not meet the error
    fields = {name: field for name, field in parent.__dataclass_fields__.items() if name != "logits"}
    return type(
        cls.__name__,
        (cls,),
        {
            "__post_init__": post_init,
            "__getattribute__": getattribute,
            "__getitem__": getitem,
            "__repr__": representation,
            "__dataclass_fields__": fields,
        },
    )
