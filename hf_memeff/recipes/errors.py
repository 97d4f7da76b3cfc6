"""What stops a recipe before its work begins."""

from __future__ import annotations

import importlib.util


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
