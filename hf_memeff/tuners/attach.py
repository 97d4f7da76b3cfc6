"""Put the engine on a model that already carries plain LoRA adapters, take it off, and report what runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from peft.tuners.lora import LoraConfig, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from hf_memeff.blocks.attach import attach_blocks, detach_blocks, engine_status
from hf_memeff.blocks.attached import attached_options
from hf_memeff.blocks.status import MemeffStatus
from hf_memeff.tuners.checks import check_base_dtypes
from hf_memeff.tuners.config import MemeffConfig, config_classes, refuse_variants
from hf_memeff.tuners.layer import use_memeff_linears, use_stock_linears
from hf_memeff.tuners.mesp import MespConfig
from hf_memeff.tuners.model import MemeffModel
from hf_memeff.tuners.options import shorten
from hf_memeff.tuners.parts import model_parts
from hf_memeff.tuners.sage import SageConfig

_BOOKKEEPING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields of `LoraConfig` that say nothing about the adapter itself."""


def attach(model: nn.Module, config: MemeffConfig | None = None) -> None:
    """Run the LoRA adapters that a model carries through the memory-efficient engine.

    Model, adapters and files stay plain LoRA; call `detach` before unloading or merging. On a model made with a config
    of this package, which is attached already, it changes the active adapter's engine options.

    Example:
        ```python
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        attach(model, SageConfig(token_budget=0.25))
        ```

    Args:
        model: a `PeftModel`, or a model with adapters injected into it (by transformers' or PEFT's own functions);
            what DDP, FSDP1, DeepSpeed or torch.compile wrapped is found inside.
        config: method and engine options: a `MespConfig` or a `SageConfig`. Its LoRA fields may repeat those of the
            live adapter, or be left at their defaults. None is `MespConfig()`, or, on a model made with a config of
            this package, the active adapter's own.

    Raises:
        ValueError: there is no LoRA adapter, a LoRA field contradicts the active adapter's, the adapter is of a
            kind that can't be trained by re-running blocks, a base layer has a dtype that can't train, the model was
            made with another method's config, or the engine refuses an option for this model, such as
            tiled_loss="always" without a causal LM head.
        OSError: the folder of the activation store can't be used.
        RuntimeError: a block can't run structured and `strict` is set.
    """
    base, tuner = model_parts(model)
    if config is None and isinstance(tuner, MemeffModel):
        tuner.attach_engine()
        return
    config = MespConfig() if config is None else config
    config.validate()
    if not any(isinstance(module, LoraLayer) for module in base.modules()):
        raise ValueError(
            f"attach got a {type(model).__name__} without LoRA layers, expected a model with a LoRA adapter. "
            f"Fix: get_peft_model(model, {type(config).__name__}(...)) adds one and attaches in one step."
        )
    if isinstance(tuner, MemeffModel) and tuner.method != config.method:
        own = config_classes()[tuner.method].__name__
        raise ValueError(
            f"attach got a {type(config).__name__} for a model made with {own}, expected a {own}. Fix: make the model "
            "with LoraConfig, which attach runs with either method."
        )
    for live in _active_configs(base):
        refuse_variants(live, config.title)
        _refuse_contradiction(config, live, base)
    check_base_dtypes(base)
    if isinstance(tuner, MemeffModel):
        tuner.attach_engine(config.engine_options())
        for live in _active_configs(base):
            for name in config.option_rules():
                setattr(live, name, getattr(config, name))
    else:
        use_stock_linears(base)
        attach_blocks(base, config.engine_options())
        use_memeff_linears(base)


def detach(model: nn.Module) -> None:
    """Undo `attach`, or what a config of this package attached: every module is as PEFT made it; adapters stay.

    Args:
        model: as for `attach`. Nothing happens to a model that is not attached.
    """
    base, tuner = model_parts(model)
    if isinstance(tuner, MemeffModel):
        tuner.detach_engine()
    else:
        detach_blocks(base)
        use_stock_linears(base)


def memeff_status(model: nn.Module) -> MemeffStatus:
    """Report which path each block, each adapted linear layer and the loss take in the next training step, and why.

    Args:
        model: as for `attach`.

    Returns:
        The report; `print` shows it as a table.
    """
    base, tuner = model_parts(model)
    status = engine_status(base)
    return dataclasses.replace(status, notes=(*status.notes, _loading_note(base, tuner)))


def _loading_note(base: nn.Module, tuner: nn.Module | None) -> str:
    """What happens to the method when the adapter is saved and loaded."""
    options = attached_options(base)
    if isinstance(tuner, MemeffModel):
        config = config_classes()[tuner.method]
    else:
        config = MespConfig if options is None or options.salient is None else SageConfig
    return (
        "a saved adapter is plain LoRA: loading its folder without config= gives plain LoRA; "
        f"pass config={config.__name__}.from_pretrained(folder) to train it on with {config.title}"
    )


def _active_configs(base: nn.Module) -> Iterator[LoraConfig]:
    """Configs of the active adapters; PEFT leaves them on the model it injects into."""
    configs = getattr(base, "peft_config", None) or {}
    layer = next(module for module in base.modules() if isinstance(module, LoraLayer))
    for name in layer.active_adapters:
        if isinstance(configs.get(name), LoraConfig):
            yield configs[name]


def _refuse_contradiction(given: MemeffConfig, live: LoraConfig, base: nn.Module) -> None:
    """Refuse a LoRA field of `given` that is neither `LoraConfig`'s default nor the live adapter's value."""
    default = LoraConfig()
    for item in dataclasses.fields(LoraConfig):
        name = item.name
        wanted, there = _comparable(getattr(given, name)), _comparable(getattr(live, name))
        if name in _BOOKKEEPING or wanted == _comparable(getattr(default, name)) or wanted == there:
            continue
        if name == "target_modules" and _targets_the_same(given, live, base):
            continue  # PEFT rewrites the live config's: "all-linear" becomes the names it found, long lists get shorter
        raise ValueError(
            f"attach got {name}={shorten(getattr(given, name))}, expected {shorten(getattr(live, name))}, the live "
            f"adapter's. Fix: leave {name} out; attach changes how an adapter is trained, not the adapter."
        )


def _comparable(value: Any) -> Any:
    """Lists and sets of names without their order; other values as they are."""
    named = isinstance(value, (list, set, tuple)) and all(isinstance(entry, str) for entry in value)
    return frozenset(value) if named else value


def _targets_the_same(given: MemeffConfig, live: LoraConfig, base: nn.Module) -> bool:
    """Whether the target modules of `given`, with the live config's other fields, are the ones that carry adapters."""
    probe = copy.copy(live)
    probe.target_modules = given.target_modules
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    for name, module in _parts_without_adapters(base):
        linear = isinstance(module, (nn.Linear, LoraLayer)) or type(module).__name__ == "Conv1D"
        if given.target_modules == "all-linear":
            wanted = linear and module is not head
        else:
            wanted = bool(check_target_module_exists(probe, name))
        if wanted != isinstance(module, LoraLayer):
            return False
    return True


def _parts_without_adapters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules as in the base model: an adapted layer stands for the layer it wraps."""
    for name, child in module.named_children():
        yield prefix + name, child
        if not isinstance(child, BaseTunerLayer):
            yield from _parts_without_adapters(child, f"{prefix}{name}.")
