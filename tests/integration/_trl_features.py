"""TRL's trainers by the features that users combine them with, each as a short run that any LoRA config can take.

``python -m integration._trl_features`` in the folder of the tests runs all of them for LoRA, MeSP and SAGE with every
token, and prints the table trainer x feature with the largest difference from LoRA's losses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

from helpers import fill_adapters, tiny_model
from hf_memeff import MespConfig, SageConfig
from integration._training import LORA, adapted, completions, losses, texts, tokenizer, trained_weights

METHODS = {"mesp": MespConfig, "sage": partial(SageConfig, token_budget=1.0)}

Config = Callable[..., LoraConfig]

_ROWS = 12
_SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
}

_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
)


def preferences() -> Dataset:
    """Prompts with a chosen and a rejected answer."""
    rows = zip(*(texts(_ROWS, 3, 12, seed) for seed in (1, 2, 3)), strict=True)
    return Dataset.from_list([{"prompt": p, "chosen": " " + c, "rejected": " " + r} for p, c, r in rows])


def judged() -> Dataset:
    """Prompts with an answer each, every second of them wanted."""
    rows = enumerate(zip(texts(_ROWS, 3, 12, 1), texts(_ROWS, 3, 12, 2), strict=True))
    return Dataset.from_list([{"prompt": p, "completion": " " + c, "label": i % 2 == 0} for i, (p, c) in rows])


def prompts() -> Dataset:
    """Prompts alone."""
    return Dataset.from_dict({"prompt": texts(_ROWS, 3, 8)})


def conversations() -> Dataset:
    """A question and an answer each."""
    rows = zip(texts(_ROWS, 3, 12, 1), texts(_ROWS, 3, 12, 2), strict=True)
    return Dataset.from_list(
        [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in rows]
    )


def _even_words(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward: the share of words with an even number."""
    rewards = []
    for completion in completions:
        numbers = [int(word[1:]) for word in completion.split() if word[1:].isdigit()]
        rewards.append(sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1))
    return rewards


@dataclass(frozen=True)
class _Kind:
    trainer: type[Trainer]
    arguments: type
    data: Callable[[], Dataset]
    own: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "SFT": _Kind(SFTTrainer, SFTConfig, partial(completions, _ROWS)),
    "DPO": _Kind(DPOTrainer, DPOConfig, preferences),
    "KTO": _Kind(KTOTrainer, KTOConfig, judged),
    "GRPO": _Kind(GRPOTrainer, GRPOConfig, prompts, {"num_generations": 2, "max_completion_length": 8}),
}


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    Attributes:
        trainer: the trainer after the run.
        losses: of each step, unrounded.
        weights: the trained parameters.
    """

    trainer: Trainer
    losses: list[float]
    weights: dict[str, Tensor]


def build(
    kind: str,
    folder: Path,
    config_cls: Config,
    brought: int = 0,
    data: Callable[[], Dataset] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer of a tiny model.

    Args:
        kind: key of `KINDS`.
        folder: for checkpoints.
        config_cls: of the adapter.
        brought: filled adapters that the model brings along; 0: the trainer adds a fresh one.
        data: in place of the trainer's usual rows.
        callbacks: for the trainer.
        settings: arguments of the trainer.
    """
    torch.manual_seed(0)
    model: nn.Module = adapted(config_cls) if brought else tiny_model()
    for index in range(1, brought):
        model.add_adapter(f"adapter{index}", config_cls(**{**LORA, "r": 2}))
        fill_adapters(model, seed=index)
    found = KINDS[kind]
    words = tokenizer()
    words.chat_template = _TEMPLATE if settings.get("assistant_only_loss") else None
    rows = (data or found.data)()
    others = {"reward_funcs": _even_words} if kind == "GRPO" else {}
    if settings.get("eval_strategy"):
        others["eval_dataset"] = rows.select(range(4))
    return found.trainer(
        model=model,
        args=found.arguments(output_dir=str(folder), **{**_SETTINGS, **found.own, **settings}),
        train_dataset=rows,
        processing_class=words,
        peft_config=None if brought else config_cls(**LORA),
        callbacks=callbacks,
        **others,
    )


def _outcome(trainer: Trainer) -> Outcome:
    return Outcome(trainer, losses(trainer), trained_weights(trainer.model))


def train(kind: str, folder: Path, config_cls: Config, **settings: Any) -> Outcome:
    """Train; `settings` as `build` takes them."""
    trainer = build(kind, folder, config_cls, **settings)
    trainer.train()
    return _outcome(trainer)


class _StopAfterTwo(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def resume(kind: str, folder: Path, config_cls: Config, **settings: Any) -> Outcome:
    """Stop after two steps, and continue in another trainer for the last one."""
    settings = {"save_strategy": "steps", "save_steps": 2, **settings}
    build(kind, folder, config_cls, callbacks=[_StopAfterTwo()], **settings).train()
    trainer = build(kind, folder, config_cls, **settings)
    trainer.train(resume_from_checkpoint=True)
    return _outcome(trainer)


_BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "save_total_limit": 1,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # which makes the first of the three models the best one, not the last
}

Run = Callable[[str, Path, Config], Outcome]

FEATURES: dict[str, dict[str, Run]] = {
    "defaults, fp32": {"SFT": train, "GRPO": train},
    "reference: disabled adapter": {"DPO": train, "KTO": train, "GRPO": partial(train, beta=0.1)},
    "model with an adapter of its own": {"SFT": partial(train, brought=1)},
    "packing, bfd": {"SFT": partial(train, packing=True, max_length=48)},
    "packing, wrapped": {"SFT": partial(train, packing=True, packing_strategy="wrapped", max_length=48)},
    "padding-free": {"SFT": partial(train, padding_free=True, max_length=None)},
    "assistant-only loss": {"SFT": partial(train, assistant_only_loss=True, data=conversations)},
    "reference: copy named ref": {
        "DPO": partial(train, brought=1),
        "KTO": partial(train, brought=1),
        "GRPO": partial(train, brought=1, beta=0.1),
    },
    "precomputed reference": {
        "DPO": partial(train, precompute_ref_log_probs=True),
        "KTO": partial(train, precompute_ref_log_probs=True),
    },
    "precomputed reference of an own adapter": {"DPO": partial(train, brought=1, precompute_ref_log_probs=True)},
    "several adapters": {"SFT": partial(train, brought=2), "DPO": partial(train, brought=2)},
    "load_best_model_at_end": {"SFT": partial(train, **_BEST), "DPO": partial(train, **_BEST)},
    "resume": {"SFT": resume, "DPO": resume},
}
"""Run by trainer, by feature. The first two are TRL's defaults but for bf16, gradient checkpointing and fused head
included; GRPO has no reference by default."""


def table(differences: dict[tuple[str, str], float]) -> str:
    """Markdown: a row per feature and a column per trainer; empty where a trainer has no such feature.

    Args:
        differences: largest difference of a loss from LoRA's, by feature and trainer.
    """
    lines = [f"| feature | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for feature in FEATURES:
        cells = [f"{differences[feature, kind]:.0e}" if (feature, kind) in differences else "" for kind in KINDS]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run everything and print the table of each method."""
    torch.set_num_threads(1)
    found: dict[str, dict[tuple[str, str], float]] = {method: {} for method in METHODS}
    for feature, runs in FEATURES.items():
        for kind, run in runs.items():
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # the trainers print their logs
                expected = run(kind, Path(folder) / "lora", LoraConfig).losses
                for method, config_cls in METHODS.items():
                    got = run(kind, Path(folder) / method, config_cls).losses
                    difference = max(abs(a - b) for a, b in zip(got, expected, strict=True))
                    found[method][feature, kind] = difference
    for method, differences in found.items():
        print(f"{method}\n\n{table(differences)}\n")


if __name__ == "__main__":
    main()
