"""What a tuner refuses before it changes the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.warning import PeftWarning
from torch import Tensor, nn

from hf_memeff.tuners.options import shorten

TRAINABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

RESERVED_NAMES = frozenset(
    {"__base__", "base_layer", "base_model", "modules_to_save", "original_module", "token_adapter"}
)
"""Names that PEFT gives to parts of an adapted model; "__base__" means "no adapter" in a mixed batch."""


def check_adapter_name(name: str, others: Iterable[str], model: nn.Module) -> None:
    """Refuse an adapter name that can't be told apart from other parts of a parameter's key.

    PEFT finds an adapter's parameters by ".name." in their keys. Where a module of the base model has that name (such
    as "layers"), it would drop every other adapter from a saved file, so only a model's sole adapter may have it.

    Args:
        name: name of the adapter to be added.
        others: names of the model's other adapters.
        model: the base model, with or without adapters.

    Raises:
        ValueError: the name is empty, reserved, has a dot or slash, or names a parameter of the model; or there are
            other adapters, and it or one of theirs names a module of the model.
    """
    taken = name
    clash = None
    if not isinstance(name, str) or not name or any(character in name for character in "./\\"):
        clash = "a name without '.', '/' and '\\'"
    elif name in RESERVED_NAMES or name.startswith("lora_") or hasattr(nn.ModuleDict, name) or name == "training":
        clash = "a name that PyTorch and PEFT don't use themselves"
    elif name in _parameter_names(model):
        clash = "a name that no parameter of the base model has"
    elif others := list(others):
        modules = {part for part, _ in _modules(model)}
        taken = next((one for one in (name, *others) if one in modules), name)
        if taken in modules:
            clash = "one that no module of the base model has, since there are several adapters"
    if clash is not None:
        raise ValueError(
            f"got the adapter name {shorten(taken)}, expected {clash}. Fix: choose another, such as 'default' or 'b'."
        )


def _parameter_names(model: nn.Module) -> set[str]:
    """Names of the base model's parameters, each without its path; adapters are left out."""
    modules = [model, *(module for _, module in _modules(model))]
    return {name for module in modules for name, _ in module.named_parameters(recurse=False)}


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The base model's modules, each with its name without path; adapters are left out."""
    for name, child in module.named_children():
        if isinstance(child, BaseTunerLayer):
            child = child.get_base_layer()
        elif isinstance(child, AuxiliaryTrainingWrapper):
            child = child.original_module
        yield name, child
        yield from _modules(child)


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


def warn_of_sharded_factors(state_dict: Mapping[str, Tensor], adapter_name: str) -> None:
    """Warn if the factors of an adapter that is about to be saved are shards, as PEFT (0.21) does for its own type.

    Args:
        state_dict: the adapter's tensors.
        adapter_name: for the message.
    """
    factors = {key: tuple(value.shape) for key, value in state_dict.items() if ".lora_A" in key or ".lora_B" in key}
    broken = {key: shape for key, shape in factors.items() if len(shape) < 2 or 0 in shape}
    if broken:
        key, shape = next(iter(broken.items()))
        warnings.warn(
            f"Adapter {adapter_name!r}: got {len(broken)} factors of shapes such as {shape} ({key}), expected "
            "matrices. DeepSpeed ZeRO-3 / FSDP shards were not gathered, so the saved file is incomplete. Fix: save "
            "through the trainer, or inside deepspeed.zero.GatheredParameters or FSDP's summon_full_params.",
            PeftWarning,
            stacklevel=6,
        )
