"""A folder in which every measurement has a file of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hf_memeff.benchmarks.results import ResultsError, read_results, write_results


class Named(Protocol):
    """A result that knows its name among those of its kind: a frozen dataclass with an ``environment``."""

    @property
    def key(self) -> str:
        """Name of its file."""


Kept = TypeVar("Kept", bound=Named)


@dataclass(frozen=True)
class Shelf(Generic[Kept]):
    """A folder with one file per result, so that an interrupted run loses none and a later one repeats none.

    Attributes:
        kind: class of the results.
        folder: where the files are.
    """

    kind: type[Kept]
    folder: Path

    def find(self, key: str) -> Kept | None:
        """The result of a name; None if it is not there.

        Raises:
            ResultsError: its file holds something else.
        """
        found = read_results(self.kind, self._path(key))
        if not found:
            return None
        if len(found) > 1 or found[0].key != key:
            raise ResultsError(
                f"Got {self._path(key)} with the results {', '.join(result.key for result in found)}, expected {key} "
                "alone. Fix: move it away, or --output DIR."
            )
        return found[0]

    def add(self, result: Kept) -> None:
        """Write a result, in place of an older one of its name."""
        write_results([result], self._path(result.key))

    def all(self) -> list[Kept]:
        """Every result, by name."""
        found = (self.find(path.stem) for path in sorted(self.folder.glob("[!.]*.json")))
        return [result for result in found if result is not None]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def joined(results: Iterable[Kept], path: Path) -> None:
    """Write results into one file, as the package keeps the committed ones; nothing if there are none."""
    results = list(results)
    if results:
        write_results(results, path)
