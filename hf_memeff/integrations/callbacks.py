"""Callbacks for `transformers.Trainer` and what builds on it, such as TRL's trainers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_memeff.tuners.attach import attach, detach
from hf_memeff.tuners.mesp import MespConfig


class MespCallback(TrainerCallback):
    """Train a plain `LoraConfig` model with MeSP: `Trainer(..., callbacks=[MespCallback()])`.

    It attaches when the trainer has been built, before accelerate, FSDP, DeepSpeed or torch.compile wrap the model, and
    detaches when training ends. Checkpoints are the plain LoRA checkpoints that they would be without it.

    Args:
        config: engine options as a `MespConfig`; its LoRA fields may repeat the model's or be left out.
        options: the same options by name, instead of `config`, such as `activation_store="disk"`.

    Raises:
        ValueError: both are given, or an option is out of its range; on attaching, the model was made with
            `MespConfig`, or `attach` refuses it.
    """

    def __init__(self, config: MespConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise ValueError(
                f"MespCallback got a config and also {', '.join(sorted(options))}, expected one of the two. "
                "Fix: put the options into MespConfig(...)."
            )
        self.config = MespConfig(**options) if config is None else config
        self._attached_by_us: nn.Module | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Attach to the trainer's model."""
        self._attach(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Attach again for a second `train()`; the first one ended detached."""
        if self._attached_by_us is None:
            self._attach(model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach from what was attached."""
        if self._attached_by_us is not None:
            detach(self._attached_by_us)
            self._attached_by_us = None

    def _attach(self, model: nn.Module) -> None:
        if getattr(model, "peft_type", None) == "MESP":
            raise ValueError(
                "MespCallback got a model made with MespConfig, which is attached already, expected one made with "
                "LoraConfig. Fix: leave the callback out."
            )
        attach(model, self.config)
        self._attached_by_us = model
