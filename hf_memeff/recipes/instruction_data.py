"""The demo's instruction set: short order notes and the JSON ticket that each of them asks for.

Licence: Apache-2.0, like the rest of the package; every sentence is assembled by this file from the
word lists in ``data/words.json``, which were written for it.

``python -m hf_memeff.recipes.instruction_data`` writes ``data/train.jsonl`` and ``data/held_out.jsonl`` again, byte
for byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEED = 20260713
TRAIN_ROWS = 320
HELD_OUT_ROWS = 48
SYSTEM_PROMPT = "Reply with an order ticket."
DATA_FOLDER = Path(__file__).parent / "data"

_DATED_TEMPLATES = (
    "Please ship {number} {item} to {city} by {day}.",
    "The {city} branch is out of {item}, send {number} before {day}.",
    "We need {item} in {city} on {day}. Make it {number}.",
    "{name} from {city} asked for {number} {item}, by {day} at the latest.",
    "By {day} we have to deliver {number} {item} to {name} in {city}.",
)
_UNDATED_TEMPLATES = (
    "{name} in {city} ordered {number} {item}.",
    "Our shop in {city} needs {number} {item}.",
    "{name} wants {number} {item} delivered to {city}.",
    "Could you send {number} {item} to my office in {city}?",
    "{number} {item} for {name}, who lives in {city}.",
    "For {city}, {number} {item} please, whenever you can.",
)


@dataclass(frozen=True)
class InstructionRow:
    """One note and its ticket.

    Attributes:
        note: what the user writes.
        ticket: the JSON object, as one line of text, that the model is to answer with.
    """

    note: str
    ticket: str


def generate(seed: int = SEED) -> tuple[list[InstructionRow], list[InstructionRow]]:
    """Assemble the instruction set; the same seed gives the same rows on every Python.

    Args:
        seed: seed of the one random generator that all rows are drawn from.

    Returns:
        ``TRAIN_ROWS`` rows to train on and ``HELD_OUT_ROWS`` rows to judge by. The nouns and cities of the held-out
        rows occur in no training row.
    """
    words = json.loads((DATA_FOLDER / "words.json").read_text(encoding="utf-8"))
    rng = random.Random(seed)
    split: list[list[InstructionRow]] = []
    for name, count in (("train", TRAIN_ROWS), ("held_out", HELD_OUT_ROWS)):
        rows: dict[str, InstructionRow] = {}
        while len(rows) < count:
            row = _row(rng, words, name)
            rows.setdefault(row.note, row)
        split.append(list(rows.values()))
    return split[0], split[1]


def _row(rng: random.Random, words: dict[str, Any], split: str) -> InstructionRow:
    dated = rng.random() < 0.5
    number_word = _pick(rng, list(words["numbers"]))
    quantity = words["numbers"][number_word]
    item = f"{_pick(rng, words['adjectives'])} {_pick(rng, words[f'{split}_nouns'])}"
    city, day = _pick(rng, words[f"{split}_cities"]), _pick(rng, words["days"])
    note = _pick(rng, _DATED_TEMPLATES if dated else _UNDATED_TEMPLATES).format(
        name=_pick(rng, words["names"]),
        day=day,
        number=number_word if rng.random() < 0.5 else quantity,
        item=item,
        city=city,
    )
    ticket = json.dumps({"item": item, "quantity": quantity, "city": city, "due": day if dated else None})
    return InstructionRow(note=note[0].upper() + note[1:], ticket=ticket)


def _pick(rng: random.Random, choices: Sequence[str]) -> str:
    # random() is the one draw whose sequence Python promises to keep for a seed; choice() and sample() are not.
    return choices[int(rng.random() * len(choices))]


def to_jsonl(rows: Sequence[InstructionRow]) -> str:
    """One JSON object per line, with the fields of `InstructionRow`."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def load_rows(name: str) -> list[InstructionRow]:
    """Read the shipped rows.

    Args:
        name: ``train`` or ``held_out``.

    Returns:
        The rows in file order.

    Raises:
        ValueError: another name.
    """
    if name not in ("train", "held_out"):
        raise ValueError(f"Got name={name!r}, expected 'train' or 'held_out'. Fix: pass one of these two.")
    text = (DATA_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    return [InstructionRow(**json.loads(line)) for line in text.splitlines()]


def main() -> None:
    """Write ``data/train.jsonl`` and ``data/held_out.jsonl``."""
    DATA_FOLDER.mkdir(exist_ok=True)
    for name, rows in zip(("train", "held_out"), generate(), strict=True):
        (DATA_FOLDER / f"{name}.jsonl").write_text(to_jsonl(rows), encoding="utf-8", newline="\n")
        print(f"{DATA_FOLDER / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
