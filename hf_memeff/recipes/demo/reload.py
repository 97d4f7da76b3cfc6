"""Score a saved adapter in stock PEFT, in a second process that does not import this package."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file
from torch import Tensor

from hf_memeff.recipes.demo import stock_peft
from hf_memeff.recipes.demo.stock_peft import TokenRow
from hf_memeff.recipes.model_source import ModelSource


class ReloadError(RuntimeError):
    """Stock PEFT could not load the adapter; the message has its last words."""


@dataclass(frozen=True)
class Reloaded:
    """What the second process reports.

    Attributes:
        loss: mean cross-entropy per answer token.
        first_logits: (rows, vocabulary) logits of the first answer token.
        answers: per row, the ids of the greedy answer.
        foreign_modules: modules of this package that were imported there; empty, or the check proves nothing.
    """

    loss: float
    first_logits: Tensor
    answers: list[list[int]]
    foreign_modules: list[str]


def score_in_stock_peft(
    source: ModelSource,
    base: Any,
    adapter: Path,
    rows: Sequence[TokenRow],
    *,
    pad_id: int,
    end_ids: Sequence[int],
    device: str,
) -> Reloaded:
    """Load base model and adapter in a new Python process and score them there.

    Args:
        source: where ``base`` was loaded from.
        base: the base model; one that came from a GGUF file is passed on as a temporary copy in transformers' own
            format inside ``adapter``, which loads in a second where GGUF takes half a minute.
        adapter: folder of the saved adapter.
        rows: what to judge by.
        pad_id: id to pad with.
        end_ids: ids that end an answer.
        device: "cpu", "cuda" or "mps".

    Returns:
        The scores, and what was imported.

    Raises:
        ReloadError: the process failed.
    """
    with tempfile.TemporaryDirectory(dir=adapter, prefix="stock-peft-") as folder:
        model_path = source.path
        if source.gguf_file is not None:
            transformers.utils.logging.disable_progress_bar()
            base.save_pretrained(folder)
            transformers.utils.logging.enable_progress_bar()
            model_path = folder
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        content = {
            "base": model_path,
            "adapter": str(adapter),
            "device": device,
            "rows": [asdict(row) for row in rows],
            "pad_id": pad_id,
            "end_ids": list(end_ids),
            "result": str(result),
        }
        request.write_text(json.dumps(content), encoding="utf-8")
        # -P: without it Python would put the script's folder, which is inside this package, in front of sys.path.
        command = [sys.executable, "-P", stock_peft.__file__, str(request)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            last_words = finished.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ReloadError(
                f"Got exit status {finished.returncode} from stock PEFT loading {adapter} ({last_words[0]}), expected "
                "0. Fix: load the folder with peft.PeftModel.from_pretrained to see the whole error."
            )
        answer = json.loads(result.read_text(encoding="utf-8"))
        logits = load_file(f"{result}.safetensors")["first_logits"].clone()  # the file goes away with the folder
    return Reloaded(answer["loss"], logits, answer["answers"], answer["foreign_modules"])
