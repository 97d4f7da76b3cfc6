"""Results as typed JSON: one entry per case and method, with the machine and the versions it was measured with."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

RESULTS_FOLDER = Path(__file__).parents[1] / "results"
"""Where the committed results are; README's figures come from nowhere else."""

_FORMAT = 1
_LIBRARIES = ("hf_memeff", "torch", "transformers", "peft", "accelerate")


class ResultsError(ValueError):
    """A results file that cannot be used; the message says what was found and how to go on."""


@dataclass(frozen=True)
class Environment:
    """What a result was measured with.

    Attributes:
        cpu: model name of the processor.
        cores: logical processors that this process may use.
        threads: threads that torch computes with.
        gpu: name of the GPU that computed; None if the CPU did, whatever else the machine has.
        system: operating system and architecture.
        versions: of Python and the libraries, by name.
        commit: git commit of this package, with "+changes" behind it if its code differs from that; None outside a
            checkout.
        date: UTC day, ISO 8601.
    """

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    system: str
    versions: dict[str, str]
    commit: str | None
    date: str

    @classmethod
    def here(cls, device: str = "cpu") -> Environment:
        """The environment of this process, computing on a device."""
        return cls(
            cpu=_cpu_name(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
            system=f"{platform.system()} {platform.machine()}",
            versions={"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES},
            commit=_commit(),
            date=datetime.now(UTC).date().isoformat(),
        )

    def comparable(self, other: Environment) -> bool:
        """Whether figures of the two may stand side by side: everything equal but commit and day."""
        return dataclasses.replace(self, commit=None, date="") == dataclasses.replace(other, commit=None, date="")

    def hardware(self) -> str:
        """The machine, in words."""
        where = self.gpu if self.gpu is not None else f"{self.cpu}, {self.cores} cores, {self.threads} threads"
        return f"{where}, {self.system}"


@dataclass(frozen=True)
class MethodResult:
    """One method on one case.

    Attributes:
        case: key of the case; the four fields after it are what it stands for.
        model: name of the model.
        weights: "real" or "random".
        dtype: "fp32" or "bf16".
        tokens: length of the one sequence.
        rank: of the adapter on every linear layer of the blocks.
        method: key of the method.
        device: "cpu" or "cuda".
        seed: of tokens, adapter values and random weights.
        loss_tile_bytes: bytes of float32 logits alive at a time in a tiled loss; None for a whole one.
        gradient_error: ``|g - g32| / |g32|`` over all adapter gradients together; g32 is plain LoRA's in float32.
        gradient_error_limit: largest error with which the method is measured at all.
        peak_bytes: most bytes alive during one forward and backward, above weights and gradients; None where the
            device has no meter.
        meter: name of the meter.
        resident_bytes: growth of anonymous and shared resident memory of a fresh process in one step, where it was
            asked for; contains what the meter cannot see.
        step_seconds: one entry per timed round.
        reference_seconds: the time reference in the same rounds.
        clock: what the seconds are.
        environment: what it was measured with.
    """

    case: str
    model: str
    weights: str
    dtype: str
    tokens: int
    rank: int
    method: str
    device: str
    seed: int
    loss_tile_bytes: int | None
    gradient_error: float
    gradient_error_limit: float
    peak_bytes: int | None
    meter: str
    resident_bytes: int | None
    step_seconds: tuple[float, ...]
    reference_seconds: tuple[float, ...]
    clock: str
    environment: Environment

    @property
    def time_ratio(self) -> float | None:
        """Median over the rounds of this method's time by the reference's in the same round; None if not timed."""
        if not self.step_seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.step_seconds, self.reference_seconds, strict=True))


@dataclass(frozen=True)
class FamilyResult:
    """One block layout on a tiny random model.

    Attributes:
        family: name of the layout.
        layer: class of its decoder layer.
        path: path that all blocks took; "mixed" if they differ.
        reason: why not "structured"; empty if they are.
        fp64_error: largest ``|g - g_lora| / |g_lora|`` of a single adapter tensor, in float64.
        fp32_error: the same in float32.
        environment: what it was measured with.
    """

    family: str
    layer: str
    path: str
    reason: str
    fp64_error: float
    fp32_error: float
    environment: Environment


AnyResult = TypeVar("AnyResult")


def write_results(results: Iterable[Any], path: Path) -> None:
    """Write results as JSON; the file is whole at any time, also if the process dies.

    Args:
        results: frozen dataclasses whose ``environment`` is an `Environment`, in the order in which they appear in the
            file.
        path: the file; its folder is created.
    """
    entries: list[dict[str, Any]] = []
    for result in results:
        ratio = {"time_ratio": result.time_ratio} if isinstance(result, MethodResult) else {}
        entries.append(asdict(result) | ratio)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "results": entries}, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)  # mkstemp's 0600 is for secrets
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_method_results(path: Path) -> list[MethodResult]:
    """`read_results` of a comparison of methods."""
    return read_results(MethodResult, path)


def read_family_results(path: Path) -> list[FamilyResult]:
    """`read_results` of the families."""
    return read_results(FamilyResult, path)


def read_results(kind: type[AnyResult], path: Path) -> list[AnyResult]:
    """Read what `write_results` wrote; an absent file has none.

    Args:
        kind: class of the results.
        path: the file.

    Raises:
        ResultsError: the file is not of this form.
    """
    return [_typed(kind, entry, path) for entry in _entries(path)]


def _entries(path: Path) -> list[Any]:
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unusable(path, f"no JSON ({error})") from error
    if (
        not isinstance(content, dict)
        or content.get("format") != _FORMAT
        or not isinstance(content.get("results"), list)
    ):
        raise _unusable(path, f"no results of format {_FORMAT}")
    return content["results"]


def _typed(kind: type[Any], entry: Any, path: Path) -> Any:
    """Build a result from its JSON object, refusing missing and unknown fields."""
    if isinstance(entry, dict):
        entry = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
        entry.pop("time_ratio", None)
    try:
        return kind(**entry | {"environment": Environment(**entry["environment"])})
    except (TypeError, KeyError) as error:
        raise _unusable(path, f"an entry that is no {kind.__name__} ({error})") from error


def _unusable(path: Path, found: str) -> ResultsError:
    return ResultsError(
        f"Got {path} with {found}, expected a file of this program. Fix: move it away, or --output DIR."
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder.parent:
            return None  # installed inside a repository of someone else
        changed = git("status", "--porcelain", "--", ".", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
