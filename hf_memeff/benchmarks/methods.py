"""The ways to train that are compared: MeSP and what else a user of PEFT could switch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memeff.benchmarks.cases import DTYPES, SEED, Case
from hf_memeff.benchmarks.comparison import METHOD_TITLES, fill_adapters, with_shared_weights, wrap
from hf_memeff.benchmarks.tiled_loss import row_tiled_cross_entropy

GRADIENT_REFERENCE = "lora"
TIME_REFERENCE = "lora-checkpointing"

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Method:
    """One way to train the same adapter.

    Attributes:
        name: as on the command line and in the results.
        title: for tables and plots.
        tuner: "lora" or "mesp".
        checkpointing: None, "non-reentrant" or "reentrant".
        tiled_loss: whether no whole logits are built.
        store: MeSP's activation store.
        gpu_only: whether it makes sense on a GPU alone.
    """

    name: str
    title: str
    tuner: str = "lora"
    checkpointing: str | None = None
    tiled_loss: bool = False
    store: str = "memory"
    gpu_only: bool = False


def _baselines() -> list[Method]:
    kinds = (("lora", None), ("lora-checkpointing", "non-reentrant"), ("lora-reentrant", "reentrant"))
    titles = METHOD_TITLES | {"lora-reentrant": "LoRA + reentrant checkpointing"}
    return [
        Method(name + suffix, titles[name] + addition, checkpointing=checkpointing, tiled_loss=tiled)
        for name, checkpointing in kinds
        for suffix, addition, tiled in (("", "", False), ("-tiled", " + tiled loss", True))
    ]


METHODS = {
    method.name: method
    for method in (
        *_baselines(),
        Method("mesp", METHOD_TITLES["mesp"], tuner="mesp", tiled_loss=True),
        Method("mesp-disk", METHOD_TITLES["mesp"] + ", disk store", tuner="mesp", tiled_loss=True, store="disk"),
        Method(
            "mesp-cpu",
            METHOD_TITLES["mesp"] + ", pinned host store",
            tuner="mesp",
            tiled_loss=True,
            store="cpu",
            gpu_only=True,
        ),
    )
}


@dataclass(frozen=True)
class Trainee:
    """A model that is trained one way, and its training step on the case's tokens.

    Attributes:
        model: the `PeftModel`, in train mode, gradients allocated.
        step: one forward and backward; adds to the gradients.
        warm_up: the same on the first few tokens, for what a model does only once.
    """

    model: Any
    step: Callable[[], None]
    warm_up: Callable[[], None]

    def clear(self) -> None:
        """Set all gradients to zero; they stay allocated."""
        self.model.zero_grad(set_to_none=False)

    def gradient(self) -> Tensor:
        """All adapter gradients in one float64 vector on the CPU, in the order of the parameters' names."""
        parameters = [p for _, p in sorted(self.model.named_parameters()) if p.requires_grad]
        return torch.cat([p.grad.flatten().double().cpu() for p in parameters])


def make_trainee(method: Method, base: Any, case: Case, like: Trainee | None = None) -> Trainee:
    """Put an adapter on a model, to be trained one way.

    Args:
        method: how.
        base: the model, without adapter; it stays so, its weights are shared.
        case: rank, tokens and dtype; a float32 ``base`` runs in float32 whatever the case says.
        like: whose adapter values to take; None: seeded random A and B (at B = 0, as LoRA starts, half of the gradient
            is zero).
    """
    fields: dict[str, Any] = {"r": case.rank, "lora_alpha": 2 * case.rank, "target_modules": "all-linear"}
    if method.tuner == "mesp":  # strict: a block that falls back would be measured under the wrong name
        fields |= {"activation_store": method.store, "strict": True}
    model = wrap(with_shared_weights(base), method.tuner, seed=SEED, task_type="CAUSAL_LM", **fields)
    if method.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": method.checkpointing == "reentrant"})
        model.enable_input_require_grads()
    fill_adapters([model] if like is None else [like.model, model])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    ids = _token_ids(case, base.device)
    row_tiles = method.tiled_loss and method.tuner == "lora"

    def loss(ids: Tensor) -> Tensor:
        if not row_tiles:
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        inner = model.get_base_model()
        hidden = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state
        head = inner.get_output_embeddings().weight
        total = row_tiled_cross_entropy(hidden[0, :-1], head, ids[0, 1:], case.loss_tile_bytes)
        return total / (ids.shape[1] - 1)

    def step(ids: Tensor) -> None:
        with torch.autocast(base.device.type, DTYPES["bf16"], enabled=base.dtype == DTYPES["bf16"]):
            value = loss(ids)
        value.backward()

    return Trainee(model, partial(step, ids), partial(step, ids[:, :_WARM_UP_TOKENS]))


def _token_ids(case: Case, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(case.shape.vocabulary, (1, case.tokens), generator=generator).to(device)
