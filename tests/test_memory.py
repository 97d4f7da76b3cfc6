"""The meters: exact figures for work whose bytes can be counted by hand."""

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from hf_memeff.memory import measure_peak_memory, saved_tensor_bytes

MIB = 2**20
ORIGINAL_CPU_METER = Path(__file__).resolve().parents[2] / "shared" / "tools" / "cpu_peak.py"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def square_and_add() -> float:
    """At its peak: the product and the sum of two 4 MiB matrices."""
    x = torch.ones(1024, 1024)
    return (x @ x + x).sum().item()


# --- peak, CPU -------------------------------------------------------------------------------------------------------


def test_cpu_peak_counts_what_lives_at_once():
    x = torch.ones(1024, 1024)
    seen = measure_peak_memory(lambda: (x @ x + x).sum().item(), device="cpu")
    assert (seen.peak_bytes, seen.held_bytes) == (8 * MIB, 0)  # x is older; the product and the sum are alive together
    assert (seen.device, seen.meter) == ("cpu", "cpu profiler")
    assert seen.result == 1024 * 1024 * 1025
    assert seen.earlier_peak_bytes is None


def test_cpu_peak_repeats_to_the_byte():
    assert len({measure_peak_memory(square_and_add, device="cpu").peak_bytes for _ in range(3)}) == 1


def test_cpu_held_counts_the_result_and_is_negative_for_older_tensors():
    kept = measure_peak_memory(lambda: [torch.ones(MIB)], device="cpu")
    assert kept.peak_bytes == kept.held_bytes == 4 * MIB
    freed = measure_peak_memory(kept.result.clear, device="cpu")
    assert (freed.peak_bytes, freed.held_bytes) == (0, -4 * MIB)


def test_cpu_peak_includes_backward():
    x, ones = torch.ones(MIB, requires_grad=True), torch.ones(MIB)
    x.grad = torch.zeros(MIB)
    y = x * ones
    seen = measure_peak_memory(lambda: y.backward(ones), device="cpu")
    assert (seen.peak_bytes, seen.held_bytes) == (4 * MIB, 0)  # the gradient, until it is added to x.grad


def test_cpu_garbage_of_an_earlier_measurement_does_not_hide_the_peak():
    class Node:
        def __init__(self) -> None:
            self.me, self.tensor = self, torch.ones(4 * MIB)

    measure_peak_memory(lambda: Node() and None, device="cpu")
    seen = measure_peak_memory(lambda: (gc.collect(), torch.ones(MIB))[1], device="cpu")
    assert seen.peak_bytes == seen.held_bytes == 4 * MIB


@pytest.mark.skipif(
    not ORIGINAL_CPU_METER.exists(), reason="the meter that defines the figure is not beside this checkout"
)
def test_cpu_peak_is_the_defining_meters():
    spec = importlib.util.spec_from_file_location("cpu_peak", ORIGINAL_CPU_METER)
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 77), nn.GELU(), nn.LayerNorm(77), nn.Linear(77, 5))
    x = torch.randn(19, 33)

    def step() -> None:
        model(x).square().mean().backward()

    step()  # allocates the gradients
    peak, held, _ = original.cpu_peak_bytes(step)
    seen = measure_peak_memory(step, device="cpu")
    assert (seen.peak_bytes, seen.held_bytes) == (peak, held)
    assert peak > 0


# --- peak, refused and elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_other_devices_are_not_measured_and_never_zero(device):
    seen = measure_peak_memory(lambda: "done", device=device)
    assert (seen.peak_bytes, seen.held_bytes, seen.result) == (None, None, "done")
    assert (seen.device, seen.meter) == (device, "not measured")


def test_not_callable_is_refused():
    with pytest.raises(TypeError, match=r"got Tensor, expected a callable.*Fix"):
        measure_peak_memory(torch.ones(1))
    with pytest.raises(TypeError, match=r"got int, expected a callable.*Fix"):
        saved_tensor_bytes(3)


def test_nested_measurement_is_refused_and_the_meter_recovers():
    with pytest.raises(RuntimeError, match="another measurement"):
        measure_peak_memory(lambda: measure_peak_memory(square_and_add, device="cpu"), device="cpu")
    assert measure_peak_memory(square_and_add, device="cpu").peak_bytes == 12 * MIB


def test_inside_a_profiler_is_refused_and_the_profile_kept():
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.ones(3).cos()
        with pytest.raises(RuntimeError, match="PyTorch profiler that records"):
            measure_peak_memory(square_and_add, device="cpu")
    assert any(event.key == "aten::cos" for event in trace.key_averages())


def test_while_a_scheduled_profiler_warms_up_is_refused_as_well():
    """Starting a second one there kills the process in torch 2.13."""
    planned = schedule(wait=0, warmup=2, active=1)
    with (
        profile(activities=[ProfilerActivity.CPU], schedule=planned),
        pytest.raises(RuntimeError, match="warms up"),
    ):
        measure_peak_memory(square_and_add, device="cpu")
    assert measure_peak_memory(square_and_add, device="cpu").peak_bytes == 12 * MIB


def test_an_error_of_the_call_comes_through_and_the_meter_recovers():
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak_memory(broken, device="cpu")
    assert measure_peak_memory(square_and_add, device="cpu").peak_bytes == 12 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_refused():
    with pytest.raises(RuntimeError, match=r"got device='cuda', expected a device of this machine.*Fix"):
        measure_peak_memory(square_and_add, device="cuda")


# --- peak, CUDA ------------------------------------------------------------------------------------------------------


class FakeCuda:
    """The counters of one CUDA device, with which the arithmetic of the CUDA meter is checked where there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: int, peak: int) -> None:
        self.allocated, self.peak, self.resets = allocated, peak, 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: int) -> None:
        self.peak, self.resets = self.allocated, self.resets + 1

    def change(self, *amounts: int) -> None:
        for amount in amounts:
            self.allocated += amount
            self.peak = max(self.peak, self.allocated)


def test_cuda_figures_are_above_the_start_and_the_lost_peak_is_reported(monkeypatch):
    cuda = FakeCuda(monkeypatch, allocated=100, peak=9000)
    seen = measure_peak_memory(lambda: cuda.change(50, 30, -60))
    assert (seen.peak_bytes, seen.held_bytes, seen.earlier_peak_bytes) == (80, 20, 9000)
    assert (seen.device, seen.meter) == ("cuda:1", "cuda allocator")
    assert cuda.resets == 1


def test_cuda_counters_are_not_reset_without_need(monkeypatch):
    cuda = FakeCuda(monkeypatch, allocated=100, peak=100)
    assert measure_peak_memory(lambda: cuda.change(50, -50)).peak_bytes == 50
    assert cuda.resets == 0


@pytest.mark.gpu
@needs_cuda
def test_cuda_peak_on_a_gpu():
    x = torch.ones(1024, 1024, device="cuda")
    x @ x  # the matmul workspace is allocated once and kept
    torch.ones(64 * MIB, device="cuda")  # an earlier peak of 256 MiB that must not be reported as this one's
    seen = measure_peak_memory(lambda: (x @ x) + x)
    assert (seen.peak_bytes, seen.held_bytes) == (8 * MIB, 4 * MIB)
    assert seen.earlier_peak_bytes >= 256 * MIB
    assert (seen.device, seen.meter) == (str(x.device), "cuda allocator")


# --- saved bytes -----------------------------------------------------------------------------------------------------


def test_frozen_linear_keeps_nothing_but_its_weight_which_does_not_count():
    layer = nn.Linear(5, 7).requires_grad_(False)
    x = torch.randn(2, 3, 5, requires_grad=True)
    assert saved_tensor_bytes(lambda: layer(x)) == 0
    layer.weight.requires_grad_(True)
    assert saved_tensor_bytes(lambda: layer(x)) == x.nbytes


def test_storages_count_once_and_whole():
    x = torch.randn(100, requires_grad=True)
    hidden = x * 1.0
    assert saved_tensor_bytes(lambda: (hidden[:3].square(), hidden[50:].square(), hidden.square())) == 400


def test_a_reused_address_is_another_storage():
    addresses = set()

    def work() -> None:
        weight = torch.ones(MIB, requires_grad=True)
        for _ in range(5):
            factor = torch.ones(MIB)
            addresses.add(factor.data_ptr())
            (factor * weight).sum()

    for _ in range(4):
        work()
    if len(addresses) == 20:
        pytest.skip("this allocator reused no address in 20 tries, though nobody held them")
    assert saved_tensor_bytes(work) == 5 * 4 * MIB


def test_exclude_takes_modules_and_tensors():
    norm = nn.BatchNorm1d(6).eval()
    x = torch.randn(4, 6, requires_grad=True)
    a, b = torch.randn(6, 2, requires_grad=True), torch.randn(2, 6, requires_grad=True)

    def forward() -> None:
        (norm(x) @ a) @ b

    everything = saved_tensor_bytes(forward)
    assert everything - saved_tensor_bytes(forward, exclude=norm) == norm.running_mean.nbytes + norm.running_var.nbytes
    assert everything - saved_tensor_bytes(forward, exclude=[a, b]) == a.nbytes + b.nbytes
    assert everything - saved_tensor_bytes(forward, exclude=a) == a.nbytes
    with pytest.raises(TypeError, match=r"got str in exclude, expected modules and tensors.*Fix"):
        saved_tensor_bytes(forward, exclude=["norm"])


def test_a_weight_saved_through_a_detached_view_is_excluded_by_its_module():
    layer = nn.Linear(5, 7, bias=False)
    x = torch.randn(3, 5, requires_grad=True)

    def forward() -> None:
        x @ layer.weight.detach().t()

    assert saved_tensor_bytes(forward) == layer.weight.nbytes
    assert saved_tensor_bytes(forward, exclude=layer) == 0


def test_checkpoint_counts_its_input_alone():
    layer = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    plain = saved_tensor_bytes(lambda: layer(x))
    assert plain == x.nbytes + 2 * 4 * 32 * 4
    assert saved_tensor_bytes(lambda: checkpoint(layer, x, use_reentrant=True)) == x.nbytes


def test_measuring_leaves_gradients_as_they_are():
    torch.manual_seed(0)
    x = torch.randn(5, 5, requires_grad=True)
    (expected,) = torch.autograd.grad((x.exp() * x).sum(), x)
    losses = []
    assert saved_tensor_bytes(lambda: losses.append((x.exp() * x).sum())) == 2 * x.nbytes
    assert torch.equal(torch.autograd.grad(losses[0], x)[0], expected)


def test_measuring_leaves_lifetimes_as_they_are():
    x = torch.randn(5, requires_grad=True)
    outputs = []

    def forward() -> None:
        y = x.exp()  # saves its own output: a hook that gave it back would keep it for ever
        outputs.append(weakref.ref(y))

    saved_tensor_bytes(forward)
    gc.collect()
    assert outputs[0]() is None
