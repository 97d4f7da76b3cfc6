"""The demo's figures, and how they are told to the user."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from torch import nn

from hf_memeff.benchmarks.comparison import EXACT_METHODS, METHOD_TITLES, MethodFigures, paired_ratio
from hf_memeff.benchmarks.results import Environment
from hf_memeff.recipes.demo.options import DemoOptions
from hf_memeff.recipes.demo.training import BATCH_ROWS
from hf_memeff.tuners.attach import memeff_status

LARGEST_LOGIT_DIFFERENCE = 1e-3
"""Between the trained model and the same adapter in stock PEFT: fp32 logits of about 20 after 30 layers, whose kernels
may sum in another order."""


@dataclass(frozen=True)
class Judgement:
    """How a model does on the held-out rows.

    Attributes:
        loss: mean cross-entropy per answer token.
        exact_match: share of rows answered with exactly the expected text.
        answers: the answers.
    """

    loss: float
    exact_match: float
    answers: list[str]


@dataclass(frozen=True)
class DemoResult:
    """Everything that one demo measured.

    Attributes:
        method: how the adapter was trained.
        model: folder or Hub id of the base model, as a saved adapter names it.
        device: "cpu", "cuda" or "mps".
        steps_wanted: optimizer steps asked for.
        steps: optimizer steps that ran.
        train_seconds: how long they took.
        notes: the held-out notes.
        tickets: what each of them should be answered with.
        before: the base model on them.
        after: the saved adapter on them, loaded in stock PEFT in another process.
        trained_loss: the trained model's loss on them, where it was trained.
        logit_difference: largest difference between the two models' logits of the first answer token.
        foreign_modules: modules of this package that the other process had imported.
        comparison_tokens: length of the one random sequence that the methods were compared on.
        comparison: figures per method.
        total_seconds: of the whole run.
        environment: machine and versions.
    """

    method: str
    model: str
    device: str
    steps_wanted: int
    steps: int
    train_seconds: float
    notes: list[str]
    tickets: list[str]
    before: Judgement
    after: Judgement
    trained_loss: float
    logit_difference: float
    foreign_modules: list[str]
    comparison_tokens: int
    comparison: list[MethodFigures]
    total_seconds: float
    environment: Environment

    def failures(self) -> list[str]:
        """What the demo should have shown and did not; empty if all of it held."""
        found = []
        if not self.after.loss < self.before.loss:
            found.append(f"training did not lower the held-out loss ({self.before.loss:.3f} to {self.after.loss:.3f})")
        if self.foreign_modules:
            found.append(f"the stock PEFT process imported {', '.join(self.foreign_modules)}")
        if not self.logit_difference <= LARGEST_LOGIT_DIFFERENCE:
            found.append(f"stock PEFT's logits differ by {self.logit_difference:.1e} from the trained model's")
        return found


def announcement(options: DemoOptions, device: str, download: str) -> str:
    """What the run is going to download, need and take."""
    own_model = options.model is not None
    model = options.model or "SmolLM2-135M-Instruct"
    lines = {
        "download": download,
        "memory": "about 5 times the fp32 weights" if own_model else "about 3 GB",
        "disk": f"the adapter in {options.output}, and for a moment "
        + ("a copy of the model if it is GGUF" if own_model else "0.6 GB there"),
        "time": ("" if own_model else "about 6 minutes on 2 cores; ") + f"{options.minutes:g} minutes at most",
    }
    title = f"hf-memeff demo: {METHOD_TITLES[options.method]} on {model}, {device}, fp32"
    return "\n".join([title, *(f"  {name:<10}{text}" for name, text in lines.items())])


def model_line(base: nn.Module, model: nn.Module) -> str:
    """Sizes of model and adapter, and which path MeSP's blocks take."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    line = f"Loaded {sum(p.numel() for p in base.parameters()) / 1e6:.0f} M parameters, adapter {trainable / 1e6:.1f} M"
    paths = Counter(block.path for block in memeff_status(model).blocks)
    return ", ".join([line, *(f"{count} blocks {path}" for path, count in paths.items())])


def training_line(options: DemoOptions, steps: int, step_seconds: float) -> str:
    """How long a step takes, and how many there will be."""
    if steps < options.steps:
        return (
            f"A step takes {step_seconds:.1f} s here. Training is shortened from {options.steps} to {steps} steps, to "
            f"stay within {options.minutes:g} minutes; --minutes allows more."
        )
    return f"A step takes {step_seconds:.1f} s here. Training for {steps} steps of {BATCH_ROWS} rows ..."


def outcome(result: DemoResult) -> str:
    """Loss and exact match before and after, one answer before and after, and what stock PEFT makes of the adapter."""
    rows = len(result.tickets)
    lines = [
        f"{f'{rows} held-out rows':<36}{'loss':>8}{'exact match':>14}",
        _score_line("before training", result.before),
        _score_line(f"after {result.steps} steps", result.after),
        "",
        f"note    {result.notes[0]}",
        f"wanted  {result.tickets[0]}",
        f"before  {_one_line(result.before.answers[0])}",
        f"after   {_one_line(result.after.answers[0])}",
        "",
        "The scores after training are the saved adapter's, loaded in stock PEFT in a process without hf_memeff. The",
        f"trained model itself: loss {result.trained_loss:.3f}, logits within {result.logit_difference:.1e} of these.",
    ]
    return "\n".join(lines)


def table(figures: list[MethodFigures]) -> str:
    """One line per method, and each of ours against gradient checkpointing in words."""
    by_method = {entry.method: entry for entry in figures}
    lines = [f"{'':<32}{'peak memory':>12}{'step time':>12}{'against LoRA':>14}{'gradient error':>16}"]
    for entry in figures:
        seconds = statistics.median(entry.step_seconds)
        error = "reference" if entry.method == "lora" else f"{entry.gradient_error:.1e}"
        if entry.method not in EXACT_METHODS:
            error = f"cosine {entry.gradient_cosine:.2f}"
        lines.append(
            f"{METHOD_TITLES[entry.method]:<32}{_mebibytes(entry.peak_bytes):>12}{f'{seconds:.2f} s':>12}"
            f"{f'{entry.time_ratio:.2f} x':>14}{error:>16}"
        )
    theirs = by_method["lora-checkpointing"]
    for name in ("mesp", "sage"):
        ours = by_method.get(name)
        if ours is None or ours.peak_bytes is None or theirs.peak_bytes is None:
            continue
        ratio = paired_ratio(ours.step_seconds, theirs.step_seconds)
        lines.append(
            f"{METHOD_TITLES[name]} takes {ours.peak_bytes / theirs.peak_bytes:.2f} of the memory of gradient "
            f"checkpointing and {ratio:.2f} of its step time ({len(ours.step_seconds)} paired runs)."
        )
    return "\n".join(lines)


def _score_line(title: str, judgement: Judgement) -> str:
    return f"  {title:<34}{judgement.loss:>8.3f}{judgement.exact_match:>14.2f}"


def _mebibytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 2**20:.1f} MiB"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:160]
