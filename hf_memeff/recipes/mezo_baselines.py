"""MeZO and MUZO against MeSP in the memory that MeSP takes: loss after so many steps of each, from one config."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import set_seed

from hf_memeff.benchmarks.results import Environment
from hf_memeff.memory import measure_peak_memory
from hf_memeff.recipes.demo.options import write_json
from hf_memeff.recipes.errors import RecipeError, make_output
from hf_memeff.recipes.mezo import PUBLISHED_LORA_EPSILON
from hf_memeff.recipes.mezo_trainer import MezoConfig, MezoTrainer
from hf_memeff.recipes.parsing import RunPlan, parse_plan
from hf_memeff.recipes.preparing import load_base, prepare, public_model
from hf_memeff.recipes.results import LossPoint
from hf_memeff.recipes.trainers import build_trainer
from hf_memeff.tuners.attach import attach
from hf_memeff.tuners.mesp import MespConfig

RESULTS_NAME = "mezo_baselines.json"
TITLES = {"mesp": "MeSP", "mezo": "MeZO", "muzo": "MUZO"}
_FORMAT = 1


@dataclass
class BaselineArguments:
    """What the baselines differ in from MeSP's run; see each field's help.

    Raises:
        RecipeError: a value is out of range.
    """

    mezo_learning_rate: float = field(
        default=5e-5, metadata={"help": "MeZO's. Its authors publish 5e-5 for LoRA on OPT-13B."}
    )
    mezo_epsilon: float = field(
        default=PUBLISHED_LORA_EPSILON,
        metadata={"help": "Size of the perturbation of both. MeZO's authors publish 1e-2 for LoRA."},
    )
    mezo_steps: int = field(default=20000, metadata={"help": "Steps of both. MeZO's authors publish 20,000."})
    muzo_learning_rate: float = field(
        default=1e-4, metadata={"help": "Adam's in MUZO: our choice, its own is not public to us."}
    )
    muzo_queries: int = field(
        default=4, metadata={"help": "Directions per step of MUZO: our choice, its own is not public to us."}
    )
    largest_batch: int = field(
        default=16,
        metadata={"help": "Most rows per step for MeZO and MUZO, if MeSP's memory has room. MeZO publishes 16."},
    )

    def __post_init__(self) -> None:
        for name in ("mezo_learning_rate", "mezo_epsilon", "mezo_steps", "muzo_learning_rate", "muzo_queries"):
            if not getattr(self, name) > 0:
                raise RecipeError(
                    f"Got {name}: {getattr(self, name)}, expected more than 0. Fix: leave it out for the default."
                )
        if self.largest_batch < 1:
            raise RecipeError(
                f"Got largest_batch: {self.largest_batch}, expected at least 1. Fix: leave it out for 16."
            )


@dataclass(frozen=True)
class BaselineRun:
    """One method's run.

    Attributes:
        method: key of `TITLES`.
        rows: of each step.
        steps: optimizer steps.
        learning_rate: of the run; MeSP's schedule is the config's, the others' is constant.
        epsilon: size of the perturbation; None for MeSP.
        queries: directions per step, two forward passes each; None for MeSP.
        peak_bytes: most bytes alive while the loss and what it is trained with (gradients) are computed for the longest
            rows, above weights and adapter; None where the device has no meter.
        state_bytes: what the optimizer keeps.
        loss_before: on the test rows.
        loss_after: likewise.
        loss_curve: training losses as logged.
        seconds: wall time of the training.
    """

    method: str
    rows: int
    steps: int
    learning_rate: float
    epsilon: float | None
    queries: int | None
    peak_bytes: int | None
    state_bytes: int
    loss_before: float
    loss_after: float
    loss_curve: tuple[LossPoint, ...]
    seconds: float

    @property
    def memory_bytes(self) -> int | None:
        """What training takes above weights and adapter."""
        return None if self.peak_bytes is None else self.peak_bytes + self.state_bytes


def run_baselines(
    config: Path, words: Sequence[str] = (), say: Callable[[str], object] = print
) -> tuple[list[BaselineRun], Path]:
    """Train one adapter three times from the same start on the same data: MeSP, MeZO, MUZO.

    MeSP's run is the config's. MeZO and MUZO get as many rows per step, in powers of two, as fit into the memory that
    MeSP takes, gradients and optimizer state included.

    Args:
        config: YAML file with the keys of a fine-tuning config and of `BaselineArguments`.
        words: command-line words that replace fields of it.
        say: called with each line for the user.

    Returns:
        The runs, and the file that they are in, `RESULTS_NAME` in the config's output folder.

    Raises:
        RecipeError: see `parse_plan` and `prepare`; or the config is none of SFT with MeSP, or has no test split.
        ModelUnavailableError: the model is missing or cannot be loaded.
    """
    plan = parse_plan(config, words, own=BaselineArguments)
    own: BaselineArguments = plan.own
    if (plan.run.trainer, plan.run.method) != ("sft", "mesp"):
        raise RecipeError(
            f"Got trainer: {plan.run.trainer} with method: {plan.run.method}, expected sft with mesp, which the "
            "baselines are compared with. Fix: leave both out."
        )
    prepared = prepare(plan, say)
    if prepared.data.test is None:
        raise RecipeError("Got no test split, expected one to judge by. Fix: set dataset_test_split.")
    output = make_output(plan.training.output_dir)
    model = load_base(plan, prepared.source)
    set_seed(plan.training.seed)  # the trainer seeds itself only after the adapter's initial values are drawn
    trainer = build_trainer(plan, model, prepared.tokenizer, prepared.data)
    initial = [parameter.detach().clone() for parameter in _trained(trainer.model)]
    rows = plan.training.per_device_train_batch_size
    batch = _longest_rows(trainer, rows)
    peak = measure_peak_memory(lambda: _backward(trainer, batch), trainer.args.device).peak_bytes
    trainer.model.zero_grad()
    runs = [_run("mesp", trainer, rows, peak, say)]
    runs += [_zeroth_order(method, plan, own, trainer, initial, runs[0], say) for method in ("mezo", "muzo")]
    path = output / RESULTS_NAME
    environment = asdict(Environment.here(str(trainer.args.device)))
    base = {"base_model": public_model(prepared.source), "dataset": asdict(prepared.data.record)}
    write_json({"format": _FORMAT, **base, "environment": environment, "runs": [asdict(run) for run in runs]}, path)
    return runs, path


def _zeroth_order(
    method: str,
    plan: RunPlan,
    own: BaselineArguments,
    first: Any,
    initial: Sequence[Tensor],
    mesp: BaselineRun,
    say: Callable[[str], object],
) -> BaselineRun:
    """Reset the adapter and train it from forward passes, with as many rows as fit into MeSP's memory."""
    model = first.model
    for parameter, value in zip(_trained(model), initial, strict=True):
        parameter.data.copy_(value)
    attach(
        model, MespConfig(tiled_loss="always")
    )  # evaluation, as which a forward pass alone counts, keeps logits else
    muzo = method == "muzo"

    def trainer(rows: int) -> MezoTrainer:
        arguments = MezoConfig(
            output_dir=str(Path(plan.training.output_dir) / method),
            epsilon=own.mezo_epsilon,
            queries=own.muzo_queries if muzo else 1,
            optim="adamw_torch" if muzo else "sgd",
            learning_rate=own.muzo_learning_rate if muzo else own.mezo_learning_rate,
            max_steps=own.mezo_steps,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=plan.training.per_device_eval_batch_size,
            seed=plan.training.seed,
            bf16=plan.training.bf16,
            use_cpu=plan.training.use_cpu,
            logging_steps=plan.training.logging_steps,
            disable_tqdm=plan.training.disable_tqdm,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,  # TRL's collator reads more columns than the model does
        )
        return MezoTrainer(
            model=model,
            args=arguments,
            train_dataset=first.train_dataset,
            eval_dataset=first.eval_dataset,
            data_collator=first.data_collator,
        )

    rows, peak = 1, _forward_peak(trainer(1))
    state = 2 * sum(p.numel() * p.element_size() for p in _trained(model)) if muzo else 0  # Adam's two moments
    while peak is not None and mesp.memory_bytes is not None and 2 * rows <= own.largest_batch:
        larger = _forward_peak(trainer(2 * rows))
        if larger is None or larger + state > mesp.memory_bytes:
            break
        rows, peak = 2 * rows, larger
    return _run(method, trainer(rows), rows, peak, say)


def _run(method: str, trainer: Any, rows: int, peak_bytes: int | None, say: Callable[[str], object]) -> BaselineRun:
    """Train and judge."""
    before = trainer.evaluate()["eval_loss"]
    say(f"{TITLES[method]}: {rows} rows a step, loss {before:.4f} before")
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    after = trainer.evaluate()["eval_loss"]
    say(f"{TITLES[method]}: loss {after:.4f} after {seconds:.0f} s")
    arguments = trainer.args
    forward_only = isinstance(arguments, MezoConfig)
    state = trainer.optimizer.state_dict()["state"].values()
    kept = [value for entry in state for value in entry.values() if isinstance(value, Tensor) and value.dim() > 0]
    return BaselineRun(
        method=method,
        rows=rows,
        steps=trainer.state.global_step,
        learning_rate=arguments.learning_rate,
        epsilon=arguments.epsilon if forward_only else None,
        queries=arguments.queries if forward_only else None,
        peak_bytes=peak_bytes,
        state_bytes=sum(value.numel() * value.element_size() for value in kept),
        loss_before=before,
        loss_after=after,
        loss_curve=tuple(LossPoint(e["step"], e["loss"]) for e in trainer.state.log_history if "loss" in e),
        seconds=seconds,
    )


def _trained(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _longest_rows(trainer: Any, count: int) -> dict[str, Tensor]:
    """A batch of the training set's longest rows, on the trainer's device."""
    data = trainer.train_dataset
    longest = sorted(range(len(data)), key=lambda index: -len(data[index]["input_ids"]))[:count]
    batch = trainer.data_collator([data[index] for index in longest])
    return {name: value.to(trainer.args.device) for name, value in batch.items() if isinstance(value, Tensor)}


def _backward(trainer: Any, batch: dict[str, Tensor]) -> None:
    with trainer.accelerator.autocast():
        loss = trainer.model.train()(**batch).loss
    loss.backward()


def _forward_peak(trainer: MezoTrainer) -> int | None:
    """Peak bytes of one estimate on the longest rows, with the gradients that an optimizer reads."""
    model, batch = trainer.model, _longest_rows(trainer, trainer.args.per_device_train_batch_size)

    def loss() -> Tensor:
        with trainer.accelerator.autocast():
            return model(**batch).loss

    peak = measure_peak_memory(lambda: trainer.estimate(model, loss), trainer.args.device).peak_bytes
    model.zero_grad()
    return peak


def baselines_table(runs: Sequence[BaselineRun]) -> str:
    """Runs as Markdown."""
    head = ["", "rows of a step", "memory, MiB", "steps", "forward passes of a step", "loss before", "after", "s"]
    rows = []
    for run in runs:
        passes = "1, and 1 backward" if run.queries is None else str(2 * run.queries)
        memory = "not measured" if run.memory_bytes is None else f"{run.memory_bytes / 2**20:.1f}"
        losses = [f"{run.loss_before:.4f}", f"{run.loss_after:.4f}"]
        rows.append([TITLES[run.method], str(run.rows), memory, str(run.steps), passes, *losses, f"{run.seconds:.0f}"])
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
