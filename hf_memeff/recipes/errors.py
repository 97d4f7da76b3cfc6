"""What stops a recipe before its work begins."""

from __future__ import annotations

import importlib.util
from pathlib import Path


class RecipeError(ValueError):
    """A config, data set or installation that a run cannot start with; the message has got, expected and the fix."""


def require_packages(extra: str, *names: str) -> None:
    """Refuse to go on without optional packages.

    Args:
        extra: the group of this package's optional dependencies that has them.
        names: what is imported.

    Raises:
        RecipeError: one of them is not installed.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"Got an installation without {', '.join(missing)}, expected {', '.join(names)}. "
            f"Fix: pip install 'hf_memeff[{extra}]'."
        )


def make_output(output_dir: str) -> Path:
    """Create the folder that a run writes to.

    Raises:
        RecipeError: it cannot be created.
    """
    output = Path(output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"Got output_dir: {output} ({error.strerror}), expected a folder to write to. Fix: choose another."
        ) from error
    return output
