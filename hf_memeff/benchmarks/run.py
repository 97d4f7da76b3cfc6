"""Run cases: verify a method's gradients, measure the peak memory of the same step, then time it in pairs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_memeff.benchmarks.cases import DTYPES, SEED, Case, load_base
from hf_memeff.benchmarks.comparison import steady_clock, timed
from hf_memeff.benchmarks.journal import Journal
from hf_memeff.benchmarks.methods import GRADIENT_REFERENCE, METHODS, TIME_REFERENCE, Method, Trainee, make_trainee
from hf_memeff.benchmarks.resident import resident_growth_bytes
from hf_memeff.benchmarks.results import MethodResult
from hf_memeff.memory import measure_peak_memory

FP32_LIMIT = 1e-5
"""Largest gradient error in fp32: the same sums in another order, over 30 blocks."""

BF16_LIMIT = 1.5
"""Largest gradient error in bf16, in errors of plain LoRA there: another order of roundings, not a coarser one."""

RESIDENT_METHODS = ("lora-checkpointing-tiled", "mesp-disk")


@dataclass
class Bench:
    """A run over cases.

    Attributes:
        journal: where results go.
        device: "cpu" or "cuda".
        load_real: loads SmolLM2 in a dtype.
        say: called with lines for the user.
        advance: called with the name of what is next and the number of steps just done, for a progress bar.
        failures: what did not hold, in words.
    """

    journal: Journal
    device: str
    load_real: Callable[[torch.dtype], Any]
    say: Callable[[str], object] = print
    advance: Callable[[str, int], object] = lambda text, steps: None
    failures: list[str] = field(default_factory=list)
    _loaded: tuple[tuple[str, str], Any] | None = None

    def run(self, cases: Sequence[Case], methods: Sequence[str] = ()) -> None:
        """Measure what the journal does not have yet: every case with these methods, or else with its own.

        A method whose gradients are off is not in the results but in `failures`; a case that does not fit into memory
        is left out and said.
        """
        for case in cases:
            todo = self._missing(case, methods)
            if not todo:
                self.say(f"{case.key}: already measured")
                continue
            available = available_bytes(self.device)
            if available is not None and case.needed_bytes > available:
                self.say(
                    f"{case.key}: left out, plain LoRA may need {case.needed_bytes / 2**30:.1f} GiB and "
                    f"{available / 2**30:.1f} GiB are free"
                )
                self.advance(case.key, self._steps(case, todo))
                continue
            self._run_case(case, todo)

    def steps(self, cases: Sequence[Case], methods: Sequence[str] = ()) -> int:
        """How many steps `run` will report to `advance`."""
        return sum(self._steps(case, self._missing(case, methods)) for case in cases)

    def _missing(self, case: Case, methods: Sequence[str]) -> list[str]:
        """Methods without a result, or with fewer timed rounds than the case wants."""
        names = methods or case.methods or [n for n, m in METHODS.items() if self.device == "cuda" or not m.gpu_only]
        found = {name: self.journal.find(case, name, self.device) for name in names}
        return [n for n, r in found.items() if r is None or len(r.step_seconds) < case.rounds]

    def _steps(self, case: Case, todo: Sequence[str]) -> int:
        untested = sum(self.journal.find(case, name, self.device) is None for name in todo)
        return untested + self._missing_rounds(case, todo) * len({*todo, TIME_REFERENCE})

    def _run_case(self, case: Case, todo: Sequence[str]) -> None:
        self.advance(f"{case.key}: loading", 0)
        base = self._base(case)
        anchor = make_trainee(METHODS[GRADIENT_REFERENCE], base, case)
        trainees: dict[str, Trainee] = {}
        reference: Reference | None = None
        for name in todo:
            trainees[name] = make_trainee(METHODS[name], base, case, like=anchor)
            if self.journal.find(case, name, self.device) is not None:
                continue
            if reference is None:
                reference = Reference.of(base, case, anchor)
            if not self._verify_and_measure(case, METHODS[name], trainees[name], reference, base):
                del trainees[name]
        if case.rounds and trainees:
            if TIME_REFERENCE not in trainees:
                trainees[TIME_REFERENCE] = make_trainee(METHODS[TIME_REFERENCE], base, case, like=anchor)
            self._time(case, trainees, todo)

    def _base(self, case: Case) -> Any:
        """The case's model; the last one is kept for the next case, and let go of before another is loaded."""
        key = (case.model, case.dtype)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            self._loaded = (key, load_base(case.shape, case.dtype, self.load_real).to(self.device))
        return self._loaded[1]

    def _verify_and_measure(
        self, case: Case, method: Method, trainee: Trainee, reference: Reference, base: Any
    ) -> bool:
        self.advance(f"{case.key}: {method.name}, gradients and memory", 0)
        trainee.warm_up()
        trainee.clear()
        peak = measure_peak_memory(trainee.step, self.device)
        error = reference.error(trainee.gradient())
        self.advance(case.key, 1)
        if not error <= reference.limit:
            self.failures.append(
                f"{case.key}: got a gradient error of {error:.1e} from {method.name}, expected at most "
                f"{reference.limit:.1e}; it is not in the results"
            )
            self.advance(case.key, case.rounds)
            return False
        self.journal.add(
            MethodResult(
                case=case.key,
                model=case.model,
                weights=case.shape.weights,
                dtype=case.dtype,
                tokens=case.tokens,
                rank=case.rank,
                method=method.name,
                device=self.device,
                seed=SEED,
                loss_tile_bytes=case.loss_tile_bytes if method.tiled_loss else None,
                gradient_error=error,
                gradient_error_limit=reference.limit,
                peak_bytes=peak.peak_bytes,
                meter=peak.meter,
                resident_bytes=self._resident_bytes(case, method.name, base),
                step_seconds=(),
                reference_seconds=(),
                clock=steady_clock(self.device),
                environment=self.journal.environment,
            )
        )
        return True

    def _resident_bytes(self, case: Case, method: str, base: Any) -> int | None:
        if not case.resident or method not in RESIDENT_METHODS or self.device != "cpu":
            return None
        self.advance(f"{case.key}: {method}, resident memory", 0)
        with tempfile.TemporaryDirectory(prefix="hf_memeff-bench-") as folder:
            base.save_pretrained(folder)
            return resident_growth_bytes(Path(folder), case, method)

    def _time(self, case: Case, trainees: dict[str, Trainee], todo: Sequence[str]) -> None:
        """Add the missing rounds, interleaved in rotating order, so that none always runs first; writes each round."""
        order = list(trainees)
        for index in range(self._missing_rounds(case, todo)):
            seconds = {}
            turn = index % len(order)
            for name in order[turn:] + order[:turn]:
                self.advance(f"{case.key}: {name}, time", 0)
                seconds[name] = timed(trainees[name].step, self.device, steady_clock(self.device))
                self.advance(case.key, 1)
            for name in set(todo) & set(trainees):
                result = self.journal.results[case.key, name, self.device]
                self.journal.add(
                    replace(
                        result,
                        step_seconds=(*result.step_seconds, seconds[name]),
                        reference_seconds=(*result.reference_seconds, seconds[TIME_REFERENCE]),
                    )
                )

    def _missing_rounds(self, case: Case, todo: Sequence[str]) -> int:
        found = [self.journal.find(case, name, self.device) for name in todo]
        return max((case.rounds - (len(result.step_seconds) if result else 0) for result in found), default=0)


@dataclass(frozen=True)
class Reference:
    """The gradients that are right, and how far off a method may be.

    Attributes:
        gradient: plain LoRA's in float32, as `Trainee.gradient` gives it.
        limit: largest error with which a method is measured.
    """

    gradient: Tensor
    limit: float

    @classmethod
    def of(cls, base: Any, case: Case, anchor: Trainee) -> Reference:
        """Run plain LoRA, in float32 on a copy of the weights if the case is bf16."""
        own = _one_gradient(anchor)
        if DTYPES[case.dtype] == torch.float32:
            return cls(own, FP32_LIMIT)
        wide = make_trainee(METHODS[GRADIENT_REFERENCE], copy.deepcopy(base).float(), case, like=anchor)
        exact = _one_gradient(wide)
        return cls(exact, BF16_LIMIT * cls(exact, 0.0).error(own))

    def error(self, gradient: Tensor) -> float:
        """``|g - g_ref| / |g_ref|``, 2-norms over all adapter gradients together."""
        return ((gradient - self.gradient).norm() / self.gradient.norm()).item()


def _one_gradient(trainee: Trainee) -> Tensor:
    trainee.clear()
    trainee.step()
    return trainee.gradient()


def available_bytes(device: str) -> int | None:
    """Free memory of a device; None where this cannot be asked."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
