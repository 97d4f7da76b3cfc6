"""What merging has to look at before it writes to the base weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_memeff.tuners.layer import MemeffLinear


def check_base_layers_can_merge(model: nn.Module) -> None:
    """Refuse to add an adapter to the weight of a linear layer that may not compute with that weight as it is.

    A quantiser's layer may be an `nn.Linear` by type and still not multiply with its weight; so may one with a
    parametrized weight. They train through their own forward, and would give other outputs after merging.

    Args:
        model: the base model with its adapters.

    Raises:
        ValueError: an adapted layer is such a one.
    """
    for name, module in model.named_modules():
        if isinstance(module, MemeffLinear) and not _multiplies_with_its_weight(module.get_base_layer()):
            base = module.get_base_layer()
            raise ValueError(
                f"got {name!r} to merge, a {type(base).__name__}, expected a plain linear layer: this one has a "
                "forward of its own or a parametrized weight, so that adding to its weight need not add to its output. "
                "Fix: load the base model with plain linear layers and merge there, or keep the adapter apart."
            )


def _multiplies_with_its_weight(base: nn.Module) -> bool:
    if hasattr(base, "parametrizations"):
        return False
    conv1d = type(base).__name__ == "Conv1D" and hasattr(base, "nf")  # GPT-2's, from transformers
    return conv1d or (isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward)


def warn_of_tied_embeddings(model: nn.Module) -> None:
    """Warn before merging in place into a weight that input and output embeddings share.

    Unlike `merge_and_unload`, merging in place is to be undone, so the two stay tied: with the weight of the adapted
    one the other changes as well, as in PEFT.

    Args:
        model: the base model with its adapters.
    """
    if _tied_and_adapted(model):
        warnings.warn(
            "Input and output embeddings are tied and one of them carries an adapter: merging in place changes both, "
            "and the model's outputs with them. merge_and_unload() unties them; so does loading the base model with "
            "tie_word_embeddings=False.",
            stacklevel=4,
        )


@contextmanager
def untied_embeddings(model: nn.Module) -> Iterator[None]:
    """Untie input and output embeddings of which one carries an adapter, so that merging changes the one alone.

    The output embeddings get a copy of the weight, and the model's config says so, so that both are saved. If the body
    raises, they are tied again.

    Args:
        model: the base model with its adapters.
    """
    if not _tied_and_adapted(model):
        yield
        return
    head = _base(model.get_output_embeddings())
    shared = head.weight
    configs = [model.config, model.config.get_text_config()]
    flags = [config.tie_word_embeddings for config in configs]
    head.weight = nn.Parameter(shared.detach().clone(), requires_grad=bool(shared.requires_grad))
    for config in configs:
        config.tie_word_embeddings = False
    try:
        yield
    except Exception:
        head.weight = shared
        for config, flag in zip(configs, flags, strict=True):
            config.tie_word_embeddings = flag
        raise
    warnings.warn(
        "Input and output embeddings were tied and one of them carried an adapter: merging has untied them "
        "(tie_word_embeddings=False in the model's config), so that the saved model holds both.",
        stacklevel=4,
    )


def _tied_and_adapted(model: nn.Module) -> bool:
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without embeddings
        return False
    if any(end is None for end in ends) or not any(isinstance(end, BaseTunerLayer) for end in ends):
        return False
    weights = [getattr(_base(end), "weight", None) for end in ends]
    return weights[0] is not None and weights[0] is weights[1]


def _base(layer: nn.Module) -> nn.Module:
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
