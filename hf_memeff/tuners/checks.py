"""What a tuner refuses before it changes the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hf_memeff.tuners.options import shorten

TRAINABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

RESERVED_NAMES = frozenset(
    {"__base__", "base_layer", "base_model", "modules_to_save", "original_module", "token_adapter"}
)
"""Names that PEFT gives to parts of an adapted model; "__base__" means "no adapter" in a mixed batch."""


def check_adapter_name(name: str, model: nn.Module) -> None:
    """Refuse an adapter name that can't be told apart from other parts of a parameter's key.

    PEFT finds an adapter's parameters by ".name." in their keys, so that the name of a module of the base model (such
    as "layers") would make it drop every other adapter from a saved file.

    Args:
        name: name of the adapter to be added.
        model: the base model, with or without adapters.

    Raises:
        ValueError: the name is empty, reserved, has a dot or slash, or names a part of the model.
    """
    clash = None
    if not isinstance(name, str) or not name or any(character in name for character in "./\\"):
        clash = "a name without '.', '/' and '\\'"
    elif name in RESERVED_NAMES or name.startswith("lora_") or hasattr(nn.ModuleDict, name) or name == "training":
        clash = "a name that PyTorch and PEFT don't use themselves"
    elif name in set(_part_names(model)):
        clash = "a name that no part of the base model has"
    if clash is not None:
        raise ValueError(
            f"got the adapter name {shorten(name)}, expected {clash}. Fix: choose another, such as 'default' or 'b'."
        )


def _part_names(module: nn.Module) -> Iterator[str]:
    """Names of the base model's modules and parameters, each without its path; adapters are left out."""
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    elif isinstance(module, AuxiliaryTrainingWrapper):
        module = module.original_module
    for name, _ in module.named_parameters(recurse=False):
        yield name
    for name, child in module.named_children():
        yield name
        yield from _part_names(child)


def check_base_dtypes(model: nn.Module) -> None:
    """Refuse a base model whose plain linear layers hold numbers that can't take part in training.

    Quantised layers of bitsandbytes, GPTQ and their like have classes or tensors of their own and pass: they compute
        in a
    floating dtype. A plain `nn.Linear` with such weights does not.

    Args:
        model: the base model.

    Raises:
        ValueError: a plain linear layer has integer, float8 or complex weights.
    """
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue
        if module.weight.dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"got weights of dtype {module.weight.dtype} in {name!r}, a plain nn.Linear, expected float16, "
                "bfloat16, float32 or float64. Fix: load the model with dtype=torch.bfloat16, or through a "
                "quantiser such as bitsandbytes."
            )


def warn_of_bare_experts(model: nn.Module, config: LoraConfig) -> None:
    """Warn if the experts of a mixture carry no adapter: they are parameters, which target_modules passes by.

    Args:
        model: the model after injection.
        config: the adapter's config.
    """
    if config.inference_mode or config.target_parameters:
        return
    bare = [name for name, parameter in model.named_parameters() if parameter.dim() == 3 and "expert" in name]
    if bare:
        warnings.warn(
            f"{len(bare)} expert parameters, such as {bare[0]!r}, carry no adapter: target_modules finds modules only. "
            f"To train them, name them in target_parameters, such as {'.'.join(bare[0].split('.')[-2:])!r}.",
            stacklevel=2,
        )
