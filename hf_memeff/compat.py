"""Version checks of the libraries this package plugs into. Imported by any layer, imports none of them."""

import warnings
from importlib.metadata import PackageNotFoundError, version

PACKAGE_VERSION = "0.1.0"

MINIMUM_PEFT = (0, 20)
"""First PEFT whose tuner hooks (`_post_injection_hook`, `_custom_modules` callables) are the ones used here."""

SAFE_TRANSFORMERS = (5, 3)
"""First transformers that asks before it runs the code which a downloaded config.json names as attention function."""


def installed_version(distribution: str) -> tuple[int, ...] | None:
    """Release numbers of an installed distribution, such as (0, 21, 2); None if it is not installed.

    Args:
        distribution: name as on PyPI.

    Returns:
        The leading integers of the version; a suffix such as ".dev0" or "+cpu" ends them.
    """
    try:
        text = version(distribution)
    except PackageNotFoundError:
        return None
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def require_peft() -> None:
    """Refuse a PEFT that is too old to plug into.

    Raises:
        ImportError: PEFT is missing or older than `MINIMUM_PEFT`.
    """
    got = installed_version("peft")
    if got is None or got < MINIMUM_PEFT:
        expected = ".".join(map(str, MINIMUM_PEFT))
        found = "none" if got is None else ".".join(map(str, got))
        raise ImportError(
            f"hf_memeff got PEFT {found}, expected {expected} or newer. Fix: pip install -U 'peft>={expected}'."
        )


def warn_of_unsafe_transformers() -> None:
    """Warn of a transformers that runs code which a downloaded config.json names (CVE-2026-4372)."""
    got = installed_version("transformers")
    if got is not None and got < SAFE_TRANSFORMERS:
        expected = ".".join(map(str, SAFE_TRANSFORMERS))
        warnings.warn(
            f"hf_memeff got transformers {'.'.join(map(str, got))}, expected {expected} or newer: older ones run code "
            "of a Hub repository that a downloaded config.json names as its attention function, without asking. "
            f"Fix: pip install -U 'transformers>={expected}'.",
            stacklevel=3,
        )
