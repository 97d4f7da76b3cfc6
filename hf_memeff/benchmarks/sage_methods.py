"""The ways to train that SAGE is compared with, and SAGE in each saliency and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model

from hf_memeff.benchmarks.comparison import METHOD_TITLES, with_shared_weights, wrap
from hf_memeff.tuners.sage import SageConfig

SALIENCIES = ("gradient", "attention", "value_norm", "random")
BUDGETS = (0.25, 0.5, 0.125)
"""Token budgets, the one that matters most first."""

NAMES = ("lora", "lora-checkpointing", "mesp", *(f"sage-{saliency}" for saliency in SALIENCIES))


@dataclass(frozen=True)
class SageMethod:
    """One way to train the same adapter.

    Attributes:
        name: one of `NAMES`.
        token_budget: SAGE's; None for the others.
        dense_layers: SAGE's; the default is its config's.
        backward_keys: SAGE's; empty for its config's default for the saliency, which takes its place.
    """

    name: str
    token_budget: float | None = None
    dense_layers: tuple[int, ...] = (-1,)
    backward_keys: str = ""

    def __post_init__(self) -> None:
        if not self.backward_keys:
            config = SageConfig(saliency=self.saliency or "attention")
            object.__setattr__(self, "backward_keys", config.effective_backward_keys)

    @property
    def saliency(self) -> str | None:
        """SAGE's saliency; None for another method."""
        return self.name.removeprefix("sage-") if self.name.startswith("sage-") else None

    @property
    def title(self) -> str:
        """For tables and plots."""
        if self.saliency is None:
            return METHOD_TITLES[self.name]
        return f"SAGE, {self.saliency.replace('_', ' ')}, {self.token_budget:g}"


LORA, MESP = SageMethod("lora"), SageMethod("mesp")


def expand(names: Sequence[str], budgets: Sequence[float]) -> list[SageMethod]:
    """Methods by name, SAGE's with each budget."""
    return [
        SageMethod(name, budget)
        for name in names
        for budget in (budgets if name.startswith("sage-") else (None,))  # the others have no budget
    ]


def make_model(method: SageMethod, base: Any, *, rank: int, seed: int) -> Any:
    """Put an adapter on every linear layer of a model's blocks; the same seed gives every method the same values.

    Args:
        method: how it is to be trained.
        base: a `PreTrainedModel`; it stays without adapter, its weights are shared.
        rank: of the adapter; its alpha is PEFT's default.
        seed: of the adapter's initial values.

    Returns:
        The `PeftModel`, in train mode.
    """
    copied = with_shared_weights(base)
    fields: dict[str, Any] = {"r": rank, "target_modules": "all-linear"}
    fields["task_type"] = "CAUSAL_LM"
    if method.name.startswith("lora"):
        model = wrap(copied, method.name, seed=seed, **fields)
        if method.name == "lora-checkpointing":
            model.enable_input_require_grads()
        return model
    fields["strict"] = True  # a block that falls back would be measured under the wrong name
    if method.saliency is None or method.token_budget is None:
        return wrap(copied, method.name, seed=seed, **fields)
    torch.manual_seed(seed)
    config = SageConfig(
        saliency=method.saliency,
        token_budget=method.token_budget,
        dense_layers=method.dense_layers,
        backward_keys=method.backward_keys,
        **fields,
    )
    return get_peft_model(copied, config).train()
