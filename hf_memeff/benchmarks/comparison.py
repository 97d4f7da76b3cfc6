"""Peak memory, paired step time and gradient error of several ways to train the same adapter.

Every way gets its own model over the same base weights and the same adapter values, so that only the way differs.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_memeff.memory import measure_peak_memory
from hf_memeff.tuners.mesp import MespConfig
from hf_memeff.tuners.sage import SageConfig

METHODS = ("lora", "lora-checkpointing", "mesp", "sage")
METHOD_TITLES = {"lora": "LoRA", "lora-checkpointing": "LoRA + gradient checkpointing", "mesp": "MeSP", "sage": "SAGE"}
EXACT_METHODS = METHODS[:3]
"""Those whose gradients are LoRA's."""

_CONFIGS = {"mesp": MespConfig, "sage": SageConfig}


@dataclass(frozen=True)
class MethodFigures:
    """What `compare` measured for one model.

    Attributes:
        method: key of the model.
        peak_bytes: most bytes alive during one forward and backward, above weights and gradients; None where the
            device has no meter.
        step_seconds: one entry per round.
        time_ratio: median over the rounds of this model's time by the reference's in the same round.
        gradient_error: ``|g - g_ref| / |g_ref|`` over all adapter gradients together; 0 for the reference.
        gradient_cosine: cosine of the angle between the two, likewise; 1 for the reference.
    """

    method: str
    peak_bytes: int | None
    step_seconds: tuple[float, ...]
    time_ratio: float
    gradient_error: float
    gradient_cosine: float


def wrap(base: nn.Module, method: str, *, seed: int = 0, **lora_fields: Any) -> Any:
    """Put a LoRA adapter on a model, to be trained one of several ways; the same seed gives the same adapter values.

    Args:
        base: a `PreTrainedModel`; it is changed in place.
        method: one of `METHODS`.
        seed: of the adapter's initial values.
        lora_fields: fields of `LoraConfig`, or of the method's own config.

    Returns:
        The `PeftModel`, in train mode.

    Raises:
        ValueError: another method.
    """
    if method not in METHODS:
        raise ValueError(f"Got method={method!r}, expected one of {', '.join(METHODS)}. Fix: pass one of these.")
    config_class = _CONFIGS.get(method, LoraConfig)
    torch.manual_seed(seed)
    model = get_peft_model(base, config_class(**lora_fields))
    if method == "lora-checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def with_shared_weights(base: nn.Module) -> Any:
    """Copy a model's modules but not its parameters and buffers: both models use the same ones, at no cost in memory.

    Args:
        base: any module, before an adapter is put on it.

    Returns:
        The copy.
    """
    tensors: list[Tensor] = [*base.parameters(), *base.buffers()]
    return copy.deepcopy(base, {id(tensor): tensor for tensor in tensors})


def fill_adapters(models: Sequence[nn.Module], *, std: float = 0.02, seed: int = 1) -> None:
    """Give every model the first one's adapter, with random B: at B = 0, as LoRA starts, half of the gradient is zero.

    Args:
        models: `PeftModel`s with the same adapter shapes.
        std: standard deviation of the entries of B.
        seed: of the entries of B.
    """
    generator = torch.Generator().manual_seed(seed)
    source = _trainable(models[0])
    for name, parameter in source.items():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
    for model in models[1:]:
        for name, parameter in _trainable(model).items():
            parameter.data.copy_(source[name].data)


def compare(
    models: Mapping[str, nn.Module],
    step: Callable[[nn.Module], object],
    *,
    reference: str,
    rounds: int,
    device: str | torch.device = "cpu",
    deadline: float | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> list[MethodFigures]:
    """Measure each model on the same step: first gradients and peak memory, then times in interleaved rounds.

    Args:
        models: by method, with equal adapter values (`fill_adapters`).
        step: runs one forward and backward of a model, deterministic.
        reference: key of the model whose gradients are right and whose time is 1.
        rounds: timed rounds, at least 1. The order rotates by one each round, so that none always runs first.
        device: where the models are.
        deadline: value of `time.monotonic` after which no further round starts; the first one runs in any case.
        after_step: called after each step, for a progress bar; there are ``len(models) * (rounds + 1)`` steps.

    Returns:
        One entry per model, in the order of ``models``.

    Raises:
        ValueError: no rounds, or an unknown reference.
    """
    if rounds < 1:
        raise ValueError(f"Got rounds={rounds}, expected at least 1. Fix: pass rounds=3 or more for a median.")
    if reference not in models:
        raise ValueError(f"Got reference={reference!r}, expected one of {', '.join(models)}. Fix: pass one of these.")
    peaks: dict[str, int | None] = {}
    gradients: dict[str, Tensor] = {}
    for method, model in models.items():
        for parameter in _trainable(model).values():
            parameter.grad = torch.zeros_like(parameter)  # there before the measurement, so that it does not count
        peaks[method] = measure_peak_memory(partial(_run, step, model), device).peak_bytes
        gradients[method] = torch.cat([p.grad.flatten().double().cpu() for p in _trainable(model).values()])
        after_step()
    seconds: dict[str, list[float]] = {method: [] for method in models}
    order = list(models)
    for round_index in range(rounds):
        if round_index and deadline is not None and time.monotonic() > deadline:
            break
        for method in order[round_index % len(order) :] + order[: round_index % len(order)]:
            seconds[method].append(timed(partial(step, models[method]), device))
            after_step()
    true = gradients[reference]
    return [
        MethodFigures(
            method=method,
            peak_bytes=peaks[method],
            step_seconds=tuple(seconds[method]),
            time_ratio=paired_ratio(seconds[method], seconds[reference]),
            gradient_error=((gradients[method] - true).norm() / true.norm()).item(),
            gradient_cosine=torch.cosine_similarity(gradients[method], true, dim=0).item(),
        )
        for method in models
    ]


def paired_ratio(seconds: Sequence[float], reference_seconds: Sequence[float]) -> float:
    """Median over the rounds of one model's time by another's in the same round; steadier than a ratio of medians."""
    return statistics.median(a / b for a, b in zip(seconds, reference_seconds, strict=True))


WALL, PROCESS = "wall time", "CPU time of the process"
_CLOCKS = {WALL: time.perf_counter, PROCESS: time.process_time}


def steady_clock(device: str | torch.device) -> str:
    """The clock to compare steps by: with one thread on the CPU, one that other processes cannot disturb.

    With one thread CPU time is the wall time of an idle core, whatever else the machine does.
    """
    return PROCESS if torch.device(device).type == "cpu" and torch.get_num_threads() == 1 else WALL


def timed(fn: Callable[[], object], device: str | torch.device, clock: str = WALL) -> float:
    """Seconds that a call takes by a clock, with the work it leaves to an accelerator."""
    now = _CLOCKS[clock]
    _synchronize(device)
    start = now()
    fn()
    _synchronize(device)
    return now() - start


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}


def _run(step: Callable[[nn.Module], object], model: nn.Module) -> None:
    """Run a step and let go of its result, which a meter would otherwise hand on."""
    step(model)


def _synchronize(device: str | torch.device) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
