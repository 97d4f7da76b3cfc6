"""The models of the memory tables: a decoder block's weights once, in as many blocks as the model has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.benchmarks.cases import ModelShape
from hf_memeff.benchmarks.comparison import fill_adapters, wrap


def build_base(shape: ModelShape, precision: str, device: str, layers: int, seed: int) -> Any:
    """A Qwen2 model with random weights, all blocks with the same ones, so that a large model fits anywhere.

    What a step allocates depends on shapes and dtypes alone.

    Args:
        shape: of the model.
        precision: "fp32", or "nf4": linear layers of the blocks in bitsandbytes' NF4, all else in bfloat16.
        device: where it goes.
        layers: decoder blocks.
        seed: of the weights.
    """
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = dataclasses.replace(shape, layers=1).build(dtype, seed).requires_grad_(False)
    decoder = model.model
    if precision == "nf4":
        _quantise(decoder.layers[0], device)
        model.is_loaded_in_4bit = True  # by which PEFT tells that the adapters are for 4-bit layers
    model.to(device)
    first = decoder.layers[0]
    shared: dict[int, Tensor] = {id(tensor): tensor for tensor in (*first.parameters(), *first.buffers())}
    for index in range(1, layers):
        block = copy.deepcopy(first, dict(shared))
        block.self_attn.layer_idx = index
        decoder.layers.append(block)
    model.config.num_hidden_layers = layers
    model.config.layer_types = list(model.config.layer_types[:1]) * layers
    return model


def _quantise(block: nn.Module, device: str) -> None:
    import bitsandbytes  # optional

    for parent in list(block.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear:
                continue
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=False,
                quant_type="nf4",
            )
            packed.weight = bitsandbytes.nn.Params4bit(
                linear.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=packed
            )
            packed.bias = linear.bias
            setattr(parent, name, packed.to(device))


def with_adapter(base: Any, precision: str, rank: int, seed: int) -> Any:
    """Put a LoRA adapter on all linear layers of the blocks, in float32 or (nf4) bfloat16, with random factors.

    Args:
        base: from `build_base`; it is changed in place.
        precision: as there.
        rank: of the adapter.
        seed: of A; B has random values too.

    Returns:
        The `PeftModel`, in train mode.
    """
    fields: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    model = wrap(base, "lora", seed=seed, task_type="CAUSAL_LM", **fields)
    if precision == "nf4":
        for parameter in trained(model):
            parameter.data = parameter.data.to(torch.bfloat16)
    fill_adapters([model])
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The adapter's parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors, a shared storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def adapted_widths(model: nn.Module) -> list[tuple[int, int]]:
    """Input width and rank of every adapter, in the model's order."""
    adapted: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "lora_A", None), nn.ModuleDict)]
    return [(m.lora_A["default"].in_features, m.lora_A["default"].out_features) for m in adapted]
