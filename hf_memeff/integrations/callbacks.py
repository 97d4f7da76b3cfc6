"""Callbacks for `transformers.Trainer` and what builds on it, such as TRL's trainers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_memeff.integrations.adapter_health import AdapterHealthCallback
from hf_memeff.integrations.budget import SageBudgetCallback
from hf_memeff.integrations.peak_memory import PeakMemoryCallback
from hf_memeff.integrations.probe import GradientProbeCallback
from hf_memeff.tuners.attach import attach, detach
from hf_memeff.tuners.config import MemeffConfig, config_classes
from hf_memeff.tuners.mesp import MespConfig
from hf_memeff.tuners.model import MemeffModel
from hf_memeff.tuners.parts import model_parts
from hf_memeff.tuners.sage import SageConfig

__all__ = [
    "AdapterHealthCallback",
    "GradientProbeCallback",
    "MespCallback",
    "PeakMemoryCallback",
    "SageBudgetCallback",
    "SageCallback",
]


class AttachCallback(TrainerCallback):
    """Base of the callbacks that train a plain `LoraConfig` model with a method of this package.

    It attaches when the trainer has been built, before accelerate, FSDP, DeepSpeed or torch.compile wrap the model, and
    detaches when training ends. Checkpoints are the plain LoRA checkpoints that they would be without it.

    Args:
        config: engine options as the method's config; its LoRA fields may repeat the model's or be left out.
        options: the same options by name, instead of `config`, such as `activation_store="disk"`.

    Raises:
        ValueError: both are given, `config` is another method's, or an option is out of its range; on attaching, the
            model was made with a config of this package, or `attach` refuses it.
    """

    config_class: ClassVar[type[MemeffConfig]]

    def __init__(self, config: MemeffConfig | None = None, **options: Any) -> None:
        expected = self.config_class.__name__
        if config is not None and options:
            raise ValueError(
                f"{type(self).__name__} got a config and also {', '.join(sorted(options))}, expected one of the two. "
                f"Fix: put the options into {expected}(...)."
            )
        if config is not None and not isinstance(config, self.config_class):
            raise ValueError(
                f"{type(self).__name__} got a {type(config).__name__}, expected a {expected}. Fix: pass "
                f"{expected}(...), or its options by name."
            )
        self.config = self.config_class(**options) if config is None else config
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
        tuner = model_parts(model)[1]
        if isinstance(tuner, MemeffModel):
            made_with = config_classes()[tuner.method].__name__
            raise ValueError(
                f"{type(self).__name__} got a model made with {made_with}, which is attached already, "
                "expected one made with LoraConfig. Fix: leave the callback out."
            )
        attach(model, self.config)
        self._attached_by_us = model


class MespCallback(AttachCallback):
    """Train a plain `LoraConfig` model with MeSP: LoRA's gradients in less memory. See `AttachCallback`.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[MespCallback()])
        ```
    """

    config_class = MespConfig


class SageCallback(AttachCallback):
    """Train a plain `LoraConfig` model with SAGE: a backward pass through salient tokens. See `AttachCallback`.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[SageCallback(token_budget=0.25)])
        ```
    """

    config_class = SageConfig
