"""What the SAGE benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_methods import SageMethod


@dataclass(frozen=True)
class LearningResult:
    """One training run and how its adapter does on the held-out rows.

    Attributes:
        dataset: key of `DATA_SETS`.
        model: name of the base model.
        method: name of the method; "base" is the model without adapter, and has no steps.
        token_budget: SAGE's; None for the others.
        seed: of the adapter's initial values, of the rows drawn and of SAGE's random choices.
        learning_rate: highest rate of the schedule.
        rank: of the adapter on every linear layer of the blocks.
        steps: optimizer steps.
        rows_per_step: rows of a step.
        longest_row: most tokens of a row.
        prompt: form of the question, "chat" or "line"; losses of one do not compare with the other's.
        test_rows: held-out rows.
        test_tokens: answer tokens in them.
        test_loss: mean cross-entropy per answer token.
        train_losses: mean loss of each tenth of the steps.
        step_seconds: median wall time of a step: forward, backward and optimizer.
        step_cpu_seconds: median CPU time of the process in a step, which does not count waiting for a busy core.
        peak_bytes: most bytes alive in forward and backward of the run's longest batch, above weights and gradients;
            None where the device has no meter.
        meter: name of the meter.
        environment: what it was measured with.
    """

    dataset: str
    model: str
    method: str
    token_budget: float | None
    seed: int
    learning_rate: float
    rank: int
    steps: int
    rows_per_step: int
    longest_row: int
    prompt: str
    test_rows: int
    test_tokens: int
    test_loss: float
    train_losses: tuple[float, ...]
    step_seconds: float | None
    step_cpu_seconds: float | None
    peak_bytes: int | None
    meter: str
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        method = SageMethod(self.method, self.token_budget)
        return learning_key(self.dataset, method, self.seed, self.learning_rate)


def method_key(method: SageMethod) -> str:
    """Name and budget."""
    return method.name if method.token_budget is None else f"{method.name}-{method.token_budget:g}"


def learning_key(dataset: str, method: SageMethod, seed: int, learning_rate: float) -> str:
    """Name of a run's file; the base model, which has no rate, has none in it."""
    rate = f"-lr{learning_rate:g}" if learning_rate else ""
    return f"{dataset}-{method_key(method)}{rate}-seed{seed}"


@dataclass(frozen=True)
class StepResult:
    """Memory and time of one method's step on rows of real text, every token a label.

    Attributes:
        dataset: key of `DATA_SETS`, whose text it is.
        model: name of the base model.
        method: name of the method.
        token_budget: SAGE's; None for the others.
        rows: rows of the step.
        tokens: tokens of each.
        rank: of the adapter.
        peak_bytes: most bytes alive during one forward and backward, above weights and gradients; None where the device
            has no meter.
        meter: name of the meter.
        cached_bytes: unique storages that the forward keeps for backward, weights aside; None with checkpointing, which
            keeps block inputs where this cannot be seen.
        step_seconds: wall time of forward and backward, one entry per round.
        step_cpu_seconds: CPU time of the process in the same rounds, which does not count waiting for a busy core.
        lora_seconds: plain LoRA's wall time in the same rounds.
        lora_cpu_seconds: its CPU time.
        checkpointing_seconds: wall time of LoRA with gradient checkpointing in the same rounds.
        checkpointing_cpu_seconds: its CPU time.
        environment: what it was measured with.
    """

    dataset: str
    model: str
    method: str
    token_budget: float | None
    rows: int
    tokens: int
    rank: int
    peak_bytes: int | None
    meter: str
    cached_bytes: int | None
    step_seconds: tuple[float, ...]
    step_cpu_seconds: tuple[float, ...]
    lora_seconds: tuple[float, ...]
    lora_cpu_seconds: tuple[float, ...]
    checkpointing_seconds: tuple[float, ...]
    checkpointing_cpu_seconds: tuple[float, ...]
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        return step_key(self.dataset, self.rows, self.tokens, SageMethod(self.method, self.token_budget))


def step_key(dataset: str, rows: int, tokens: int, method: SageMethod) -> str:
    """Name of a step's file."""
    return f"{dataset}-{rows}x{tokens}-{method_key(method)}"


@dataclass(frozen=True)
class CosineResult:
    """How far SAGE's gradient is from the exact one.

    Attributes:
        dataset: key of `DATA_SETS`.
        model: name of the base model.
        adapter: "random", B with entries of standard deviation `b_std`, or "trained", after LoRA's training run.
        b_std: of a random adapter; None for a trained one.
        saliency: SAGE's.
        token_budget: SAGE's.
        dense_layers: SAGE's.
        backward_keys: SAGE's.
        rank: of the adapter.
        cosines: of the whole gradient to the exact one, one per batch.
        norm_ratios: norm of SAGE's gradient by the exact one's, one per batch.
        layer_cosines: per block, mean over the batches of the cosine of that block's gradient.
        environment: what it was measured with.
    """

    dataset: str
    model: str
    adapter: str
    b_std: float | None
    saliency: str
    token_budget: float
    dense_layers: tuple[int, ...]
    backward_keys: str
    rank: int
    cosines: tuple[float, ...]
    norm_ratios: tuple[float, ...]
    layer_cosines: tuple[float, ...]
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        method = SageMethod(f"sage-{self.saliency}", self.token_budget, self.dense_layers, self.backward_keys)
        return cosine_key(self.dataset, self.adapter, method)


def cosine_key(dataset: str, adapter: str, method: SageMethod) -> str:
    """Name of a measurement's file."""
    dense = f"dense{','.join(map(str, method.dense_layers)) or 'none'}"
    return f"{dataset}-{adapter}-{method.saliency}-{method.token_budget:g}-{dense}-{method.backward_keys}"
