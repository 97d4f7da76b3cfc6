"""The benchmarks' progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar over steps.

    Args:
        total: number of steps.

    Yields:
        A function of the name of what is next and the number of steps just done.
    """
    with tqdm(total=total, unit="step") as bar:

        def advance(text: str, steps: int) -> None:
            bar.set_description_str(text, refresh=steps == 0)
            bar.update(steps)

        yield advance
