"""The two meters behind every memory figure of this package: peak bytes of a call, bytes kept for its backward.

Tests, benchmarks and users measure with these functions, so that their figures mean the same. All figures are bytes
(1 MiB = 2**20 bytes); "above the start" means that what was allocated before the call does not count, so allocate
gradients and optimizer state first if they should not.

The CUDA meter has never been run on a GPU yet.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

_measuring = threading.Lock()


@dataclass(frozen=True)
class PeakMemory:
    """What `measure_peak_memory` saw.

    Attributes:
        peak_bytes: most bytes allocated at once during the call, above the start; None where nothing can measure it.
        held_bytes: bytes allocated at the end, above the start, the result included. Negative if the call freed older
            tensors. None as above.
        device: the one device measured, such as "cpu" or "cuda:0".
        meter: "cpu profiler", "cuda allocator" or "not measured".
        result: what the call returned.
        earlier_peak_bytes: CUDA only: `torch.cuda.max_memory_allocated` before the call, which restarts that counter;
            for readers that keep a maximum over the whole run.
    """

    peak_bytes: int | None
    held_bytes: int | None
    device: str
    meter: str
    result: Any = field(repr=False, compare=False)
    earlier_peak_bytes: int | None = None


def measure_peak_memory(fn: Callable[[], Any], device: str | torch.device | None = None) -> PeakMemory:
    """Peak bytes that PyTorch's allocator of one device hands out while `fn()` runs, above what was allocated before.

    - CPU: the profiler's allocation events: every tensor and kernel workspace that goes through PyTorch's CPU allocator
      on behalf of the calling thread, backward and worker threads of PyTorch included, Python threads that `fn` starts
      not. Repeats to the byte. Freeing an older tensor counts only if an earlier measurement saw it allocated, since
      the profiler knows no other sizes. Page-locked and memory-mapped memory (the files of an activation store) is not
      in it, nor what other libraries allocate. `fn` runs slower under the profiler: do not time it here.
    - CUDA: the caching allocator's `allocated` statistic (not `reserved`), without synchronising. The peak counters
      of that device cannot be read for a stretch without restarting them, so they are restarted
      (`torch.cuda.reset_peak_memory_stats`, which restarts reserved and all others too) unless the counter already
      equals the bytes allocated now. Other readers lose the peaks from before this call; `earlier_peak_bytes` has
      theirs. Counters of other devices, and the accumulated ones, stay.
    - Anything else (mps, xpu, ...): `fn` runs and the figures are None, never 0.

    Args:
        fn: called once, without arguments.
        device: what to measure. None: the current CUDA device if this process has used CUDA, else another accelerator
            if the machine has one, else the CPU.

    Returns:
        The figures and the result of `fn`.

    Raises:
        TypeError: `fn` is not callable.
        RuntimeError: called within another measurement, or on the CPU while a PyTorch profiler records or warms up
            (profilers do not nest: the outer one would silently lose its events); a CUDA device was named and there is
            none.
    """
    _require_callable(fn)
    target = _default_device() if device is None else torch.device(device)
    if target.type not in ("cpu", "cuda"):
        return PeakMemory(None, None, str(target), "not measured", fn())
    if not _measuring.acquire(blocking=False):
        raise RuntimeError(
            "measure_peak_memory got a call while another measurement runs, expected one at a time (they share "
            "one counter). Fix: measure the inner call on its own."
        )
    try:
        gc.collect()  # cycles freed while fn runs would count as its own frees and hide part of the peak
        return _measure_cpu(fn) if target.type == "cpu" else _measure_cuda(fn, target)
    finally:
        _measuring.release()


def _require_callable(fn: object) -> None:
    if not callable(fn):
        raise TypeError(
            f"got {type(fn).__name__}, expected a callable without arguments. "
            "Fix: pass the work itself, as in `lambda: model(**batch).loss.backward()`."
        )


def _default_device() -> torch.device:
    if torch.cuda.is_initialized():
        return torch.device("cuda")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # A CUDA device that nothing has used yet is not where fn's work is; other accelerators have no such query.
    return torch.device("cpu") if accelerator is None or accelerator.type == "cuda" else accelerator


def _measure_cpu(fn: Callable[[], Any]) -> PeakMemory:
    if profiler_in_use():
        raise RuntimeError(
            "measure_peak_memory got a PyTorch profiler that records or warms up, expected none (the CPU meter is a "
            "profiler itself and they do not nest). Fix: measure outside of the profiled region."
        )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = fn()
    # The events are read from Kineto itself: `trace.events()` would first build a Python object per operator.
    events = [
        event
        for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return PeakMemory(peak, held, "cpu", "cpu profiler", result)


def _measure_cuda(fn: Callable[[], Any], device: torch.device) -> PeakMemory:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"measure_peak_memory got device={str(device)!r}, expected a device of this machine, which has no "
            'usable CUDA device. Fix: device="cpu".'
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    before = torch.cuda.memory_allocated(index)
    earlier_peak = torch.cuda.max_memory_allocated(index)
    if earlier_peak > before:
        torch.cuda.reset_peak_memory_stats(index)
    result = fn()
    peak = torch.cuda.max_memory_allocated(index) - before
    held = torch.cuda.memory_allocated(index) - before
    return PeakMemory(peak, held, f"cuda:{index}", "cuda allocator", result, earlier_peak)


def profiler_in_use() -> bool:
    """Whether a PyTorch profiler records, or warms up to; they do not nest.

    A scheduled profiler that warms up says so nowhere, and starting another one then kills the process (torch 2.13), so
    it is looked for among all objects, which takes some hundredths of a second.
    """
    if autograd_profiler._is_profiler_enabled:
        return True
    profilers = [o for o in gc.get_referrers(autograd_profiler.profile) if type(o) is autograd_profiler.profile]
    # under acc_events the results may be those of an earlier cycle
    return any(one.entered and (one.kineto_results is None or one.acc_events) for one in profilers)


def saved_tensor_bytes(fn: Callable[[], Any], exclude: nn.Module | Iterable[nn.Module | Tensor] = ()) -> int:
    """Bytes of the storages that autograd packs for backward while `fn()` runs: what a forward keeps.

    Each storage counts once and whole, however many operations save it and however small the view that they save,
    because that is what stays allocated. Parameters (`nn.Parameter`, and whatever shares a storage with one that is
    seen) do not count; copies of them in another dtype, which autocast makes, do. A leaf that requires grad and is no
    `nn.Parameter` counts, since the input of a model's first block is one under gradient checkpointing: name weights
    held as plain tensors in `exclude`.

    Not seen: what a Function hides outside of `save_for_backward`, and the inside of regions that keep nothing, such as
    `torch.utils.checkpoint`. Memory-mapped tensors of an activation store count like others. Saved-tensor hooks of the
    caller do not run meanwhile.

    Args:
        fn: called once, without arguments. Pass a forward; all that is packed in a backward or a second forward
            inside `fn` is added, and every storage stays alive until `fn` returns, so that a reused address is not
            taken for the same.
        exclude: modules (their parameters and buffers) and tensors whose storages do not count.

    Returns:
        Bytes, on all devices together.

    Raises:
        TypeError: `fn` is not callable, or `exclude` holds something else than modules and tensors.
    """
    _require_callable(fn)
    excluded = _excluded_storages(exclude)
    packed: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        packed[storage._cdata] = storage
        # Only the view's base tells that a saved `weight.t()` is a parameter's.
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            excluded[storage._cdata] = storage
        # The tensor itself would tie an operation to its own output in a cycle that nothing collects.
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for address, storage in packed.items() if address not in excluded)


def _excluded_storages(exclude: nn.Module | Iterable[nn.Module | Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages by the address of their C++ object; holding them keeps the addresses theirs."""
    storages: dict[int, torch.UntypedStorage] = {}
    for item in (exclude,) if isinstance(exclude, (nn.Module, Tensor)) else exclude:
        if isinstance(item, nn.Module):
            tensors = [*item.parameters(), *item.buffers()]
        elif isinstance(item, Tensor):
            tensors = [item]
        else:
            raise TypeError(
                f"saved_tensor_bytes got {type(item).__name__} in exclude, expected modules and tensors. "
                "Fix: pass exclude=model, or a list of the tensors."
            )
        storages.update({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors})
    return storages
