"""What the example scripts share with the command line: errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hf_memeff.benchmarks.results import ResultsError
from hf_memeff.benchmarks.sage_text import DataError
from hf_memeff.recipes.card_fields import CardError
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.model_source import ModelUnavailableError


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Inside of a ``with`` block, end the process with a line instead of a traceback where a message says what to do.

    Args:
        program: name to begin the line with.

    Raises:
        SystemExit: with that line for errors of configs, data, models and results; with 130 after Ctrl-C.
    """
    try:
        yield
    except (RecipeError, CardError, DataError, ResultsError, ModelUnavailableError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(130)
