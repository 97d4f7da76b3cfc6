"""A step without the arithmetic of its matrix products: every tensor is allocated and freed, filled with zeros.

What a step allocates depends on shapes alone, while nearly all of its time goes into matrix products and attention. On
a CPU without half-precision units this makes the difference between seconds and an hour for the paper's setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return a.new_zeros(a.shape[0], b.shape[1])


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return _mm(a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return a.new_zeros(a.shape[0], a.shape[1], b.shape[2])


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return _bmm(a, b)


def _in_place(target: Tensor, *_: Any, **__: Any) -> Tensor:
    return target


def _into(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out


def _heads_last(like: Tensor) -> Tensor:
    """(B, H, S, d) over memory in the order (B, S, H, d), as the CPU's attention kernel returns its results."""
    return like.new_zeros(like.shape[0], like.shape[2], like.shape[1], like.shape[3]).transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], query.shape[2], query.shape[1])
    return _heads_last(query), query.new_zeros(shape, dtype=torch.float32).transpose(1, 2)


def _attention_backward(g: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _heads_last(query), _heads_last(key), _heads_last(value)


def _dequantize(packed: Tensor, absmax: Tensor, blocksize: int, kind: str, shape: Any, dtype: torch.dtype) -> Tensor:
    return packed.new_zeros(*shape, dtype=dtype)


def _gemm_4bit(
    x: Tensor, packed: Tensor, shape: Any, absmax: Tensor, blocksize: int, kind: str, bias: Tensor | None = None
) -> Tensor:
    """bitsandbytes unpacks the whole weight for the product, and lets go of it afterwards."""
    weight = _dequantize(packed, absmax, blocksize, kind, shape, x.dtype)
    return x.new_zeros(*x.shape[:-1], weight.shape[0])


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.addmm_.default: _in_place,
    _aten.baddbmm_.default: _in_place,
    _aten.mm.out: _into,
    _aten.addmm.out: _into,
    _aten.bmm.out: _into,
    _aten.baddbmm.out: _into,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


class SkippedProducts(TorchDispatchMode):
    """Inside of a ``with`` block on the CPU, matrix products, attention and 4-bit weights are zeros.

    They are allocated as PyTorch (2.13) and bitsandbytes (0.50) allocate them, in shape, dtype and layout. Two things
    differ: the attention kernel's scratch memory, some 100 kB per thread, is left out; and where a graph adds gradients
    up, autograd may take a new tensor instead of reusing one, since this mode holds a second reference to it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return _PRODUCTS[func](*args, **kwargs)
        if func.namespace == "bitsandbytes":
            if func._opname == "dequantize_4bit":
                return _dequantize(*args, **kwargs)
            if func._opname == "gemm_4bit":
                return _gemm_4bit(*args, **kwargs)
        return func(*args, **kwargs)
