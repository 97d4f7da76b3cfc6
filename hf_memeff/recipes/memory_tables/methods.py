"""The ways to make a training step that the memory tables compare, all on the same model with the same adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_memeff.blocks.causal_loss import attach_loss, detach_loss, loss_report
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.recipes.memory_tables.models import adapted_widths, trained
from hf_memeff.recipes.mezo import PUBLISHED_LORA_EPSILON, add_direction_, estimate_slope
from hf_memeff.tuners.attach import attach, detach
from hf_memeff.tuners.mesp import MespConfig

LEARNING_RATE = 1e-4
"""The paper's, for SGD."""

MEZO_SEED = 1


@dataclass(frozen=True)
class StepMethod:
    """One way to make a step.

    Attributes:
        key: in the results.
        title: in the tables.
        blocks: "graph" (autograd keeps all), "checkpointed" (PyTorch's checkpoint around each block), "mesp" or
            "forward" (no gradients).
        tiled_loss: whether the loss is this package's, which never builds whole logits.
        keeps_h: whether every adapter's h = x A^T is kept until the step ends.
    """

    key: str
    title: str
    blocks: str
    tiled_loss: bool = True
    keeps_h: bool = False


METHODS = {
    method.key: method
    for method in (
        StepMethod("lora-stock-loss", "LoRA, stock loss", "graph", tiled_loss=False),
        StepMethod("lora", "LoRA", "graph"),
        StepMethod("mebp-stock-loss", "MeBP, stock loss", "checkpointed", tiled_loss=False),
        StepMethod("mebp", "MeBP", "checkpointed"),
        StepMethod("mesp-stock-loss", "MeSP, stock loss", "mesp", tiled_loss=False),
        StepMethod("mesp-h", "MeSP, h stored", "mesp", keeps_h=True),
        StepMethod("mesp", "MeSP", "mesp"),
        StepMethod("mezo", "MeZO", "forward"),
    )
}
"""By key, those with the same blocks side by side. Loss and attention kernel are the same where no title says else."""

SWEPT = ("mebp-stock-loss", "mebp", "mesp", "mezo")
"""Methods of the tables by length and by rank."""


@contextmanager
def blocks_run_as(model: Any, blocks: str, mlp_tile_tokens: int | None = None) -> Iterator[None]:
    """Inside of a ``with`` block the model's decoder blocks run one way; afterwards they are as they were.

    Args:
        model: a `PeftModel`.
        blocks: see `StepMethod`.
        mlp_tile_tokens: for "mesp", see `MespConfig`.

    Raises:
        RuntimeError: "mesp", and a block can't run structured.
    """
    if blocks == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif blocks == "mesp":
        attach(model, MespConfig(tiled_loss="never", strict=True, mlp_tile_tokens=mlp_tile_tokens))
    try:
        yield
    finally:
        if blocks == "checkpointed":
            model.gradient_checkpointing_disable()
            # switched on with checkpointing, and in transformers 5.24 not off with it
            model.get_base_model().disable_input_require_grads()
        elif blocks == "mesp":
            detach(model)


@contextmanager
def loss_runs_as(model: Any, tiled: bool) -> Iterator[None]:
    """Inside of a ``with`` block the model's loss is tiled, or stock.

    Raises:
        RuntimeError: it cannot be tiled.
    """
    base = model.get_base_model()
    if tiled:
        attach_loss(base, EngineOptions())
    try:
        # asked here, since the first answer takes a check with real logits
        if tiled and (report := loss_report(base, EngineOptions())).path != "tiled":
            raise RuntimeError(
                f"Got a loss from whole logits ({report.reason}), expected a tiled one, whose memory is to be "
                "measured. Fix: measure another model."
            )
        yield
    finally:
        if tiled:
            detach_loss(base)


def make_step(model: Any, method: StepMethod, ids: Tensor) -> Callable[[], None]:
    """The step of a method: gradients and SGD, or (MeZO) two evaluations and the same update from the seed.

    Args:
        model: inside of `blocks_run_as` and `loss_runs_as`; its parameters have gradients, except for MeZO.
        method: which.
        ids: (1, S) tokens.
    """
    parameters = trained(model)

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def mezo() -> None:
        estimate = estimate_slope(loss, parameters, MEZO_SEED, PUBLISHED_LORA_EPSILON)
        add_direction_(parameters, estimate.seed, -LEARNING_RATE * estimate.slope)

    if method.blocks == "forward":
        return mezo
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)

    def step() -> None:
        with _kept_h(model, ids.shape[1]) if method.keeps_h else _nothing():
            loss().backward()
        optimizer.step()

    return step


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _kept_h(model: Any, tokens: int) -> Iterator[None]:
    """Inside of a ``with`` block every block's forward pass leaves tensors of the shape and dtype of its adapters' h.

    They stay until the end of the block, so that the peak is that of a MeSP which stores h and frees it last of all: an
    upper bound, met where the peak is in the loss or in the backward pass of the last block, when all h are alive.
    """
    kept: list[Tensor] = []

    def keep(block: Any, *_: Any) -> None:
        dtype = next(p.dtype for p in block.parameters() if p.requires_grad)
        device = next(block.parameters()).device
        kept.extend(torch.empty(tokens, rank, dtype=dtype, device=device) for _, rank in adapted_widths(block))

    hooks = [block.register_forward_hook(keep) for block in model.get_base_model().model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        kept.clear()
