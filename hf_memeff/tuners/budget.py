"""The token budget of a SAGE model that is attached: read it, and change it between steps."""

from __future__ import annotations

from torch import nn

from hf_memeff.blocks.attach_salient import set_token_budget
from hf_memeff.blocks.attached import attached_options
from hf_memeff.tuners.model import MemeffModel
from hf_memeff.tuners.parts import model_parts


def token_budget_of(model: nn.Module) -> float | str | None:
    """The token budget that the next training step of a model runs with.

    Args:
        model: as for `attach`.

    Returns:
        A ratio or "adaptive"; None if the model doesn't run with SAGE.
    """
    options = attached_options(model_parts(model)[0])
    return None if options is None or options.salient is None else options.salient.token_budget


def configured_token_budget(model: nn.Module) -> float | str | None:
    """The token budget that the active adapter's config asks for, whatever it was changed to since.

    Args:
        model: as for `attach`.

    Returns:
        A ratio or "adaptive"; None if the model wasn't made with `SageConfig`.
    """
    tuner = model_parts(model)[1]
    if not isinstance(tuner, MemeffModel):
        return None
    names = [name for name in tuner.active_adapters if name in tuner.peft_config]
    return getattr(tuner.peft_config[names[0]], "token_budget", None) if names else None


def change_token_budget(model: nn.Module, token_budget: float | str, caller: str) -> float | str:
    """Change the token budget of the steps to come; the config, and with it what is saved, keeps its own.

    Args:
        model: as for `attach`.
        token_budget: a ratio in (0, 1], or "adaptive".
        caller: who wants it, for the message.

    Returns:
        The budget before.

    Raises:
        ValueError: the model doesn't run with SAGE.
    """
    before = token_budget_of(model)
    if before is None:
        raise ValueError(
            f"{caller} got a model that doesn't run with SAGE, expected one made with SageConfig or one that SAGE "
            "is attached to. Fix: get_peft_model(model, SageConfig(...)), or add SageCallback(...) to the callbacks."
        )
    set_token_budget(model_parts(model)[0], token_budget)
    return before
