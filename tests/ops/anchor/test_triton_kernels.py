"""The Triton kernels compiled ahead for GPUs that need not be there: they fit shared memory and spill no register."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_memeff.ops.anchor import triton_kernels
from hf_memeff.ops.anchor.triton_backend import CHUNK

# shared memory of a thread block, in bytes, by compute capability
LARGEST = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
POINTERS = {
    **dict.fromkeys(("tiles", "starts", "stripes"), "*i64"),
    **dict.fromkeys(("quotas", "counts", "positions", "ranks", "digits"), "*i32"),
    **dict.fromkeys(("anchors", "cuts", "sinks", "lse"), "*fp32"),
}

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path) -> Iterator[None]:
    """Compile anew, and leave nothing behind."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


def source(kernel: Any, dtype: str, constants: dict[str, Any]) -> ASTSource:
    """A kernel as it is launched: tensors and strides of model tensors are multiples of 16, constants are known."""
    function = getattr(kernel, "fn", kernel) if not isinstance(kernel, triton.JITFunction) else kernel
    signature, divisible = {}, {}
    for position, name in enumerate(function.arg_names):
        kind = "*" + dtype if name in ("q", "k", "v", "out", "means") else POINTERS.get(name, "i32")
        signature[name] = "constexpr" if name in constants else "fp32" if name == "log2_scale" else kind
        if signature[name].startswith("*") or name.startswith("stride"):
            divisible[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, divisible)


def check(kernel: Any, dtype: str, constants: dict[str, Any], options: dict[str, int], capability: int) -> None:
    """Compile for a target, and look at what the binary takes."""
    compiled = triton.compile(source(kernel, dtype, constants), GPUTarget("cuda", capability, 32), options)
    assert compiled.metadata.shared <= LARGEST[capability]
    place = Path(triton.knobs.cache.dir) / "kernel.cubin"
    place.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", place], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    print(f"{compiled.name} {dtype} {constants} {options} sm_{capability}: {registers=} {compiled.metadata.shared=}")
    # what a kernel without local arrays has on its stack are registers that did not fit
    assert registers <= 255 and stack == 0, f"{stack} bytes of registers spilled"


def tuned(kernel: Any, dtype: str, size: int) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Constants and options of every config that may be chosen for a head size."""
    constants: dict[str, Any] = {"D": size, "BLOCK_D": size}
    if kernel is triton_kernels.attend_kernel:
        constants.update(DV=size, BLOCK_DV=size, HAS_SINKS=False)
    else:
        constants.update(PARTS=triton_kernels.parts(DTYPES[dtype]))
    configs = kernel.early_config_prune(kernel.configs, {"q": torch.empty(0, dtype=DTYPES[dtype])}, **constants)
    return [({**constants, **c.kwargs}, {"num_warps": c.num_warps, "num_stages": c.num_stages}) for c in configs]


def shaped(dtype: str, size: int, group: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants and options of the stripe kernel."""
    shape = triton_kernels.stripe_shape(size, group, DTYPES[dtype])
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in shape}
    shape.update({"group": 1} if group == 1 else {})
    parts = triton_kernels.parts(DTYPES[dtype])
    return {"D": size, "BLOCK_D": size, "PARTS": parts, "CHUNK": CHUNK, **shape}, options


def test_anchor_kernel_compiles_for_sm_80() -> None:
    check(triton_kernels.anchor_kernel, "bf16", *tuned(triton_kernels.anchor_kernel, "bf16", 64)[0], 80)


def test_stripe_kernel_compiles_for_sm_100() -> None:
    check(triton_kernels.stripe_kernel, "bf16", *shaped("bf16", 64, 3), 100)


def test_attend_kernel_compiles_for_sm_90() -> None:
    check(triton_kernels.attend_kernel, "bf16", *tuned(triton_kernels.attend_kernel, "bf16", 64)[0], 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", LARGEST)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["anchor_kernel", "attend_kernel"])
def test_every_config_compiles(name: str, dtype: str, size: int, capability: int) -> None:
    kernel = getattr(triton_kernels, name)
    for constants, options in tuned(kernel, dtype, size):
        check(kernel, dtype, constants, options, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", LARGEST)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype,group", [("bf16", 1), ("bf16", 2), ("bf16", 7), ("fp32", 7)])
def test_stripe_kernel_compiles_for_every_group(dtype: str, group: int, size: int, capability: int) -> None:
    check(triton_kernels.stripe_kernel, dtype, *shaped(dtype, size, group), capability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
def test_there_is_a_config_for_every_head_size(size: int, dtype: torch.dtype) -> None:
    for kernel in (triton_kernels.anchor_kernel, triton_kernels.attend_kernel):
        found = kernel.early_config_prune(
            kernel.configs, {"q": torch.empty(0, dtype=dtype)}, BLOCK_D=size, BLOCK_DV=size
        )
        full = dtype == torch.float32
        assert found and all((config in triton_kernels.FULL_CONFIGS) == full for config in found)
        assert size > 128 or len(found) == sum((c in triton_kernels.FULL_CONFIGS) == full for c in kernel.configs)
