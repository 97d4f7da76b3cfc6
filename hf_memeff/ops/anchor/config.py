"""Settings of AnchorAttention, and their JSON form with calibrated thresholds."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_LARGEST = 2**31 - 1  # upper end of every count: a larger value is a mistake in units
LARGEST_THETA = 1e4
"""Logits differ by less: from here on only inf means "keep every key"."""
_LARGEST_FILE_BYTES = 2**24


@dataclass(frozen=True)
class AnchorAttentionConfig:
    """What AnchorAttention keeps, and when it runs at all; each field's help says how to choose its value.

    Raises:
        ValueError: a value is outside its range; says what was got, what is expected and how to fix it.
    """

    theta: float | str = field(
        default=12.0,
        metadata={
            "help": (
                "How far below the anchor, in logits, a key may score and still be kept. 12 is the paper's; smaller "
                "is faster and keeps less. inf keeps every key. 'auto' uses the calibrated thresholds per layer and "
                "head, which is where most of the speed comes from: see calibrate_anchor."
            )
        },
    )
    block_size: int = field(default=128, metadata={"help": "Rows that are averaged before keys are compared to them."})
    step: int = field(default=16, metadata={"help": "Blocks of a superblock, whose rows share one set of kept keys."})
    init_blocks: int = field(default=1, metadata={"help": "First blocks of each sequence that are always kept; 0 too."})
    dense_tail: int = field(
        default=0,
        metadata={
            "help": (
                "Last query tokens of each sequence that see every key. As many as a question after a long document "
                "has makes its answer see all of it, at a cost of that many rows."
            )
        },
    )
    min_length: int = field(
        default=4096,
        metadata={"help": "Sequences shorter than this many tokens are computed densely: nothing is gained there."},
    )
    max_keep: int | None = field(
        default=None,
        metadata={"help": "Most kept keys per head and superblock, those with the highest margin; None is no limit."},
    )
    dense_above: float | str | None = field(
        default="auto",
        metadata={
            "help": (
                "Kept share of the candidates above which a head's superblock is computed densely: gathering nearly "
                "all keys costs more than reading them in place. 'auto' is the backend's own break-even; None never."
            )
        },
    )
    backend: str | None = field(
        default=None, metadata={"help": "Name of the backend to force; None chooses by the tensors' device."}
    )
    strict: bool = field(
        default=False,
        metadata={
            "help": (
                "Raise where a long causal prompt has to be computed densely because of what the call asks for "
                "(a foreign mask, softcap, dropout), instead of counting it in anchor_report. A compiled forward is "
                "dense and counted nowhere, with this too."
            )
        },
    )
    thresholds: Mapping[int, Sequence[float]] | None = field(
        default=None,
        metadata={"help": "Calibrated theta per layer index and query head, used where theta='auto'."},
    )

    def __post_init__(self) -> None:
        _check(self._theta_fits(), "theta", self.theta, "a number from -1e4 to 1e4, inf or 'auto'")
        for name, least in (("block_size", 1), ("step", 1), ("init_blocks", 0), ("dense_tail", 0), ("min_length", 1)):
            _check(_count(getattr(self, name), least), name, getattr(self, name), f"an integer from {least}")
        _check(
            self.max_keep is None or _count(self.max_keep, 1), "max_keep", self.max_keep, "None or an integer from 1"
        )
        above = self.dense_above
        fine = above is None or above == "auto" or (_number(above) and 0 <= float(above) <= 1)
        _check(fine, "dense_above", above, "'auto', None or a share from 0 to 1")
        named = self.backend is None or (isinstance(self.backend, str) and self.backend.isidentifier())
        _check(named, "backend", self.backend, "None or the name of a backend")
        _check(isinstance(self.strict, bool), "strict", self.strict, "True or False")
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", _checked_thresholds(self.thresholds))
        if (self.theta == "auto") != (self.thresholds is not None):
            got = "without thresholds" if self.thresholds is None else "with thresholds, which only 'auto' reads"
            raise ValueError(
                f"AnchorAttentionConfig got theta={self.theta!r} {got}, expected theta='auto' and thresholds together. "
                "Fix: config = calibrate_anchor(model, input_ids) makes both, on a text of your own."
            )

    def _theta_fits(self) -> bool:
        if isinstance(self.theta, str):
            return self.theta == "auto"
        return _threshold(self.theta)

    def head_thresholds(self, layer: int, heads: int) -> tuple[float, ...]:
        """Theta of each query head of a layer.

        Args:
            layer: index of the decoder layer.
            heads: H.

        Returns:
            H numbers.

        Raises:
            ValueError: calibrated thresholds that don't cover this layer or have another number of heads.
        """
        if self.thresholds is None:
            return (float(self.theta),) * heads
        found = self.thresholds.get(layer)
        if found is None or len(found) != heads:
            got = "none" if found is None else f"{len(found)}"
            raise ValueError(
                f"AnchorAttentionConfig got {got} thresholds for layer {layer}, expected {heads}, one per query head. "
                "Fix: calibrate this model with calibrate_anchor(model, input_ids)."
            )
        return tuple(found)

    def dense_share(self, automatic: float) -> float:
        """Kept share above which a head's superblock is dense; ``automatic`` is the backend's own, inf is never."""
        if self.dense_above is None:
            return math.inf
        return automatic if self.dense_above == "auto" else float(self.dense_above)

    def to_json(self) -> str:
        """Every field as strict JSON; inf is written as the string "inf"."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["theta"] = _plain(self.theta)
        if self.thresholds is not None:
            values["thresholds"] = {str(layer): [_plain(x) for x in row] for layer, row in self.thresholds.items()}
        return json.dumps(values, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> AnchorAttentionConfig:
        """Read what `to_json` wrote.

        Raises:
            ValueError: not JSON, not an object, a field that does not exist, or a value out of its range.
        """
        if len(text) > _LARGEST_FILE_BYTES:
            raise ValueError(f"got {len(text)} characters of JSON, expected at most {_LARGEST_FILE_BYTES}")
        values = json.loads(text)
        names = {item.name for item in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= names:
            got = sorted(map(str, set(values) - names))[:5] if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"got {got}, expected a JSON object with some of the fields {', '.join(sorted(names))}")
        if values.get("theta") == "inf":
            values["theta"] = math.inf
        rows = values.get("thresholds")
        if isinstance(rows, dict):
            values["thresholds"] = {_layer(key): _unplain(row) for key, row in rows.items()}
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file; what was there stays whole until the new one is."""
        path = Path(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            written = Path(folder) / path.name
            written.write_text(self.to_json() + "\n", encoding="utf-8")
            os.replace(written, path)

    @classmethod
    def load(cls, path: str | Path) -> AnchorAttentionConfig:
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: as `from_json`, or the file is no UTF-8 text; the message names the file.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read(_LARGEST_FILE_BYTES + 1))
        except ValueError as error:  # so are JSONDecodeError and UnicodeDecodeError
            raise ValueError(
                f"{path}: {error}. Fix: pass a file that AnchorAttentionConfig.save wrote, or calibrate again."
            ) from error


def _check(fine: bool, name: str, value: Any, expected: str) -> None:
    if not fine:
        text = repr(value)
        text = text if len(text) <= 80 else text[:60] + "..."
        default = AnchorAttentionConfig.__dataclass_fields__[name].default
        raise ValueError(
            f"AnchorAttentionConfig got {name}={text}, expected {expected}. "
            f"Fix: pass one of these, or leave it out for {default!r}."
        )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _threshold(value: Any) -> bool:
    return _number(value) and (value == math.inf or abs(value) <= LARGEST_THETA)


def _checked_thresholds(thresholds: Any) -> dict[int, tuple[float, ...]]:
    """A plain copy of the thresholds, so that a caller's later change of theirs has no effect."""
    expected = "a mapping from layer index to one number from -1e4 to 1e4 or inf per query head"
    _check(isinstance(thresholds, Mapping), "thresholds", thresholds, expected)
    for layer, row in thresholds.items():
        _check(_count(layer, 0) and isinstance(row, (list, tuple)) and bool(row), "thresholds", {layer: row}, expected)
        _check(all(_threshold(x) for x in row), "thresholds", {layer: row}, expected)
    return {layer: tuple(map(float, row)) for layer, row in thresholds.items()}


def _plain(theta: float | str) -> float | str:
    return "inf" if theta == math.inf else theta


def _layer(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key


def _unplain(row: Any) -> Any:
    return [math.inf if x == "inf" else x for x in row] if isinstance(row, list) else row
