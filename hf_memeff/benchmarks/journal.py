"""The results file of a run: what is there already, and what is added to it one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_memeff.benchmarks.cases import SEED, Case
from hf_memeff.benchmarks.results import Environment, MethodResult, read_method_results, write_results


@dataclass
class Journal:
    """The results of a file, written again whenever one is added.

    Attributes:
        path: the file.
        environment: what is measured with now; results of another one do not count as there.
        force: whether nothing counts as there.
        results: by case, method and device.
    """

    path: Path
    environment: Environment
    force: bool = False
    results: dict[tuple[str, str, str], MethodResult] = field(default_factory=dict)
    _new: set[tuple[str, str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for result in read_method_results(self.path):
            self.results[result.case, result.method, result.device] = result

    def find(self, case: Case, method: str, device: str) -> MethodResult | None:
        """A result that need not be measured again, timed or not."""
        key = (case.key, method, device)
        found = self.results.get(key)
        if found is None or found.seed != SEED or not found.environment.comparable(self.environment):
            return None
        return None if self.force and key not in self._new else found

    def add(self, result: MethodResult) -> None:
        """Put a result in, in place of an older one, and write the file."""
        key = (result.case, result.method, result.device)
        self.results[key] = result
        self._new.add(key)
        write_results(self.results.values(), self.path)
