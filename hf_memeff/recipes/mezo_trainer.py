"""Zeroth-order baselines behind one small Trainer: MeZO (SGD along drawn directions) and MUZO (averages of them, Adam).

MeZO is "Fine-Tuning Language Models with Just Forward Passes", arXiv 2305.17333; `MezoConfig`'s defaults are what its
authors publish for LoRA. MUZO is "Leveraging Multiple Queries and Momentum for Zeroth-Order Fine-Tuning of Large
Language Models", EMNLP 2025 (2025.emnlp-main.432): averages over several directions, given to Adam. Its code and
settings are not public to us, so that whatever is set for it here is our own choice and no repetition of its results.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_memeff.recipes.mezo import PUBLISHED_LORA_EPSILON, SlopeEstimate, add_direction_, directions, estimate_slope


@dataclass
class MezoConfig(TrainingArguments):
    """`TrainingArguments` for `MezoTrainer`; the defaults are MeZO's published settings for LoRA on OPT-13B.

    ``optim="sgd"`` is MeZO: nothing is stored, neither direction nor gradient nor optimizer state. Any other optimizer
    gets the estimate as the parameters' gradients; with "adamw_torch" and several queries that is MUZO.

    Raises:
        ValueError: a value is out of range, or belongs to training with gradients.
    """

    epsilon: float = field(
        default=PUBLISHED_LORA_EPSILON,
        metadata={
            "help": "Size of the perturbation. MeZO's authors take 1e-2 for LoRA, 1e-3 for all weights, 1e-1 for "
            "prefixes. Smaller: nearer to the slope, until rounding of the loss hides it."
        },
    )
    queries: int = field(
        default=1,
        metadata={
            "help": "Directions per batch, whose estimates are averaged. Each costs two forward passes; the variance "
            "falls with their number."
        },
    )
    optim: str = field(default="sgd", metadata={"help": "sgd for MeZO; an optimizer of transformers for MUZO."})
    learning_rate: float = field(default=5e-5, metadata={"help": "MeZO's for LoRA on OPT-13B."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Constant in MeZO."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "16 in MeZO."})
    max_steps: int = field(default=20000, metadata={"help": "20,000 in MeZO."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "MeZO has no gradient to clip; MUZO may clip its."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon > 0:
            raise ValueError(f"Got epsilon={self.epsilon}, expected more than 0. Fix: leave it out for 1e-2.")
        if self.queries < 1:
            raise ValueError(f"Got queries={self.queries}, expected at least 1. Fix: leave it out for MeZO's 1.")
        if self.fp16:
            raise ValueError(
                "Got fp16=True, expected float32 or bfloat16: its loss scaling needs gradients of a backward pass. "
                "Fix: bf16=True."
            )
        if self.world_size > 1:
            raise ValueError(
                f"Got {self.world_size} processes, expected 1: each would go along its own slope. Fix: start one "
                "process, and use gradient_accumulation_steps for more rows."
            )
        if self.stores_nothing and self.max_grad_norm > 0:
            raise ValueError(
                f"Got max_grad_norm={self.max_grad_norm} with optim='sgd', expected 0: there is no gradient to clip. "
                "Fix: leave it out."
            )

    @property
    def stores_nothing(self) -> bool:
        """Whether the update is made from seeds (MeZO)."""
        return str(getattr(self.optim, "value", self.optim)) == "sgd"


class SeedSGD(torch.optim.Optimizer):
    """SGD on estimates that are seeds and slopes: ``p -= lr * (sum_i slope_i z_i + weight_decay * p)``.

    It has no state. Directions are drawn in the order of the parameters in the groups.

    Args:
        params: as for any optimizer.
        lr: learning rate.
        estimates: seeds and factors of the next step, filled by its owner; `step` empties it.
        weight_decay: as in `torch.optim.SGD`.
    """

    def __init__(self, params: Any, lr: float, estimates: list[tuple[int, float]], weight_decay: float = 0.0) -> None:
        self.estimates = estimates
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the estimates."""
        loss = None if closure is None else closure()
        rates = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                rates[parameter] = group["lr"]
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for seed, factor in self.estimates:
            for parameter, z in directions(list(rates), seed):
                parameter.add_(z, alpha=-rates[parameter] * factor)
                del z
        self.estimates.clear()
        return loss


class MezoTrainer(Trainer):
    """`transformers.Trainer` that estimates gradients from forward passes: MeZO, or MUZO, see `MezoConfig`.

    Each micro-batch is evaluated along directions of its own, drawn from the run's seed, the step and their number, so
    that a resumed run goes on as if it had not stopped. Dropout is off, as in MeZO. Everything else is the Trainer's.

    Args:
        model: the model; what requires gradients is trained.
        args: the settings.
        others: as for `Trainer`.
    """

    def __init__(self, model: Any, args: MezoConfig, **others: Any) -> None:
        self._estimates: list[tuple[int, float]] = []
        self._micro_batch = 0
        if args.stores_nothing:
            others["optimizer_cls_and_kwargs"] = (SeedSGD, {"lr": args.learning_rate, "estimates": self._estimates})
        super().__init__(model=model, args=args, **others)

    def train(self, *positional: Any, **named: Any) -> Any:
        """As `Trainer.train`; what an interrupted run left of its last step is forgotten."""
        self._estimates.clear()
        self._micro_batch = 0
        return super().train(*positional, **named)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Estimate the gradient of one micro-batch's loss; returns the loss.

        Args:
            model: the model.
            inputs: the micro-batch.
            num_items_in_batch: what the loss is divided by, if the model does so.
        """
        inputs = self._prepare_inputs(inputs)
        scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        scaled = getattr(self, "loss_is_scaled_for_ga", None) or scaled or self.compute_loss_func is not None
        parts = 1 if scaled else self.current_gradient_accumulation_steps

        def loss() -> Tensor:
            with self.compute_loss_context_manager():
                return self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch).mean() / parts

        return torch.tensor(self.estimate(model, loss), device=self.args.device)

    def estimate(self, model: nn.Module, loss: Callable[[], Tensor]) -> float:
        """Estimate the gradient of a loss, and keep the estimate for the optimizer's next step.

        Args:
            model: what the loss is computed with; it is in eval mode meanwhile.
            loss: as for `estimate_slope`.

        Returns:
            The mean of the losses.
        """
        parameters = self._parameters()
        model.eval()
        try:
            found = [estimate_slope(loss, parameters, seed, self.args.epsilon) for seed in self._seeds()]
        finally:
            model.train()
        for estimate in found:
            self._take(estimate, parameters)
        return sum(estimate.loss for estimate in found) / len(found)

    def _parameters(self) -> list[Tensor]:
        """What is trained, in the order in which the optimizer draws directions."""
        if self.optimizer is None:
            return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _take(self, estimate: SlopeEstimate, parameters: list[Tensor]) -> None:
        factor = estimate.slope / self.args.queries
        if self.args.stores_nothing:
            self._estimates.append((estimate.seed, factor))
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        add_direction_([p.grad for p in parameters if p.grad is not None], estimate.seed, factor)

    def _seeds(self) -> list[int]:
        """Seeds of this micro-batch's directions."""
        step, batch = self.state.global_step, self._micro_batch
        self._micro_batch = 0 if self.accelerator.sync_gradients else batch + 1
        return [
            random.Random(f"{self.args.seed}/{step}/{batch}/{query}").getrandbits(63)
            for query in range(self.args.queries)
        ]
