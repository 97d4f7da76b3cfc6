"""One of two processes: trains the shared tiny model under DDP and FSDP2 and saves what it found.

Run as ``python _distributed_worker.py RANK FOLDER``; the processes meet through a file in the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers import fill_adapters, tiny_model, token_batch
from hf_memeff import MespConfig, attach, memeff_status

STEPS = 2
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def build(method: str) -> nn.Module:
    """A filled adapter: LoRA, MespConfig, or `attach` on LoRA."""
    model = get_peft_model(tiny_model(), (MespConfig if method == "mesp" else LoraConfig)(**LORA))
    fill_adapters(model)
    if method == "attach":
        attach(model)
    return model.train()


def rows_of(rank: int | None, seed: int) -> dict[str, Tensor]:
    """Two of four rows, or all of them."""
    batch = token_batch(rows=4, seed=seed)
    return batch if rank is None else {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}


def train(model: nn.Module, rank: int | None, forwards: int = 1) -> dict[str, Any]:
    """Losses of two steps, and the gradients of the second, which sees weights that the first one changed."""
    trained = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([model(**rows_of(rank, 10 * step + index)).loss for index in range(forwards)]).sum()
        loss.backward()
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
    return {"losses": losses, "gradients": {n: _whole(p.grad) for n, p in trained.items() if p.grad is not None}}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def ddp(
    method: str, rank: int, forwards: int = 1, checkpointing: bool | None = None, **settings: Any
) -> dict[str, Any]:
    """Train under DDP; `checkpointing` is the value of use_reentrant."""
    model = build(method)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    return train(DistributedDataParallel(model, **settings), rank, forwards)


def fsdp(method: str, rank: int, factors: bool = False) -> dict[str, Any]:
    """Train under FSDP2, each block a unit; with `factors` each adapter factor is one too, as by PEFT's policy."""
    model = build(method)
    if factors:
        for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
            fully_shard(layer.lora_A["default"])
            fully_shard(layer.lora_B["default"])
    for block in model.get_submodule("base_model.model.model.layers"):
        fully_shard(block)
    fully_shard(model)
    found = train(model, rank)
    found["paths"] = [block.path for block in memeff_status(model).blocks]
    return found


SCENARIOS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "ddp": lambda method, rank: ddp(method, rank),
    "ddp, two forwards": lambda method, rank: ddp(method, rank, forwards=2),
    "ddp, two forwards, checkpointing": lambda method, rank: ddp(method, rank, 2, checkpointing=False),
    "ddp, two forwards, reentrant checkpointing": lambda method, rank: ddp(method, rank, 2, checkpointing=True),
    "ddp, unused parameters looked for": lambda method, rank: ddp(method, rank, find_unused_parameters=True),
    "fsdp": lambda method, rank: fsdp(method, rank),
    "fsdp, factors apart": lambda method, rank: fsdp(method, rank, factors=True),
}
CASES = [(scenario, "mesp") for scenario in SCENARIOS]
CASES += [(scenario, method) for scenario in ("ddp, two forwards", "fsdp") for method in ("lora", "attach")]


def main(rank: int, folder: Path) -> None:
    """Run all cases; an error of one is its result."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {}
    for name, method in CASES:
        try:
            found[name, method] = SCENARIOS[name](method, rank)
        except Exception as error:
            found[name, method] = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
