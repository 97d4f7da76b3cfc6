"""Trainings that die: killed in a step, or out of disk space in the middle of a save.

Run as ``python _crash_worker.py FOLDER DISK``, where DISK is a small file system of its own or "-". Each training is a
child process, so that it may be killed; what it leaves lies in FOLDER and DISK.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import Trainer, TrainerCallback

from helpers import tiny_model
from hf_memeff import MespConfig, SageConfig
from integration._training import adapted, losses, trainer

METHODS = {
    "lora": LoraConfig,
    "mesp": MespConfig,
    "sage": partial(SageConfig, token_budget=0.4, sink_tokens=1, dense_layers=(), saliency="random"),
}
WEIGHTS, OPTIMIZER = "adapter_model.safetensors", "optimizer.pt"


def model_of(method: str) -> nn.Module:
    """The model that every run of a method starts from."""
    return adapted(METHODS[method], lora_dropout=0.1)


def train(method: str, folder: Path, *callbacks: TrainerCallback, resume: Any = None) -> Trainer:
    """Four steps with a checkpoint every two, of which the last is kept."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    built = trainer(folder, model_of(method), callbacks=list(callbacks), **saving)
    built.train(resume_from_checkpoint=resume)
    return built


class Kill(TrainerCallback):
    """SIGKILL between the backward pass and the optimizer step of step 3."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Fill(TrainerCallback):
    """After the first save, leave so much on the disk that the next one ends in the middle of a file."""

    def __init__(self, filler: Path, part: str) -> None:
        self.filler, self.part = filler, part

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        sizes = {path.name: path.stat().st_size for path in Path(args.output_dir, "checkpoint-2").iterdir()}
        room = sizes[self.part] // 2
        if self.part == OPTIMIZER:  # the adapter's own files are written before
            room += sum(
                -(-size // 4096) * 4096 for name, size in sizes.items() if name[-3:] not in (".pt", "pth", "bin")
            )
        space = os.statvfs(self.filler.parent)
        self.filler.write_bytes(b"0" * (space.f_bavail * space.f_frsize - room))


def run_out_of_space(method: str, disk: Path, part: str) -> dict[str, Any]:
    """Train until a save fails; then see what is left of the save before, and resume from it."""
    folder, filler = disk / "run", disk / "filler"
    report: dict[str, Any] = {"error": ""}
    shutil.rmtree(folder, ignore_errors=True)
    try:
        train(method, folder, Fill(filler, part))
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report["files"] = sorted(path.name for path in (folder / "checkpoint-4").glob("*"))
    loaded = PeftModel.from_pretrained(tiny_model(), folder / "checkpoint-2")
    report["loaded"] = sum(bool(p.abs().max() > 0) for n, p in loaded.named_parameters() if "lora_B" in n)
    filler.unlink()
    try:
        train(method, folder, resume=True)
    except Exception as error:
        report["error of the part"] = f"{type(error).__name__}: {error}"
    report["losses"] = losses(train(method, folder, resume=str(folder / "checkpoint-2")))
    return report


def in_a_child(work: Any) -> int:
    """The wait status of a child process that runs `work`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def main(folder: Path, disk: Path | None) -> None:
    """Kill one training of each method; fill the disk in the others."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for method in METHODS:
        status = in_a_child(partial(train, method, folder / method, Kill()))
        found[method] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if disk is not None:
        for method, part in product(("mesp", "sage"), (WEIGHTS, OPTIMIZER)):
            name = f"{method}, {part}"
            report = folder / f"{name}.json"

            def work(method: str = method, part: str = part, report: Path = report) -> None:
                report.write_text(json.dumps(run_out_of_space(method, disk, part)))

            in_a_child(work)
            found[name] = json.loads(report.read_text())
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), None if sys.argv[2] == "-" else Path(sys.argv[2]))
