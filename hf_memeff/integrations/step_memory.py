"""Peak memory of one training step by phase, for steps whose parts run in different places of a training loop."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "hf_memeff::step::"
_ENGINE = "autograd::engine::evaluate_function"
"""Begins the name of the event in which autograd's engine runs one node of the graph."""

_TYPES = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}


@dataclass
class StepPeaks:
    """Peaks of one step on one device, in bytes above what was allocated when the step began.

    Attributes:
        forward_bytes: most bytes allocated at once until the backward pass begins, the loss included; with
            accumulation, in the micro-batch where that is most. 0 if the phase allocated nothing.
        backward_bytes: likewise from the first node that autograd runs in a micro-batch to its end; for the last one,
            clipping of gradients included.
        optimizer_bytes: likewise while the optimizer steps.
        start_bytes: CUDA only: bytes that PyTorch's allocator had handed out when the step began.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    optimizer_bytes: int = 0
    start_bytes: int | None = None
    _held_bytes: int = field(default=0, repr=False)

    @property
    def step_bytes(self) -> int:
        """The largest of the three."""
        return max(self.forward_bytes, self.backward_bytes, self.optimizer_bytes)

    def add(self, phase: str, change_bytes: int) -> None:
        """Count one allocation (or, below zero, one release) in a phase."""
        self._held_bytes += change_bytes
        if change_bytes > 0:
            name = f"{phase}_bytes"
            setattr(self, name, max(getattr(self, name), self._held_bytes))


class StepMeter:
    """Follow the allocations of one step with PyTorch's profiler.

    The figures are those of `measure_peak_memory` on the CPU, and on CUDA bytes of the caching allocator; nothing is
    synchronised and no counter is restarted, so that other readers of the counters see what they would see without it.
    What Python threads of the training loop allocate is not seen. The host keeps a record of each operator until the
    step ends. The CUDA figures have never been taken on a GPU yet.

    Args:
        device_type: "cpu" or "cuda".
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._trace: profile | None = None
        self._starts: dict[int, int] = {}

    @property
    def running(self) -> bool:
        """Whether a step is being measured."""
        return self._trace is not None

    def start(self) -> None:
        """Begin with the forward phase."""
        gc.collect()  # what cycles hold would be released at any time, and hide part of a peak
        if self.device_type == "cuda":
            self._starts = {index: torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
        self._trace = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._trace.start()

    def enter(self, phase: str) -> None:
        """Say that "forward" (of the next micro-batch) or "optimizer" begins; the backward pass is found by itself."""
        with record_function(_MARK + phase):
            pass

    def stop(self) -> dict[str, StepPeaks]:
        """End the step; its peaks by device, such as "cpu" or "cuda:0"."""
        trace, self._trace = self._trace, None
        assert trace is not None
        trace.stop()
        phase = "forward"
        found: dict[int, StepPeaks] = {}
        wanted = _TYPES[self.device_type]
        # The trace's own events(): building its Python objects would take seconds per step.
        for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            name = event.name()
            if name == "[memory]":
                if event.device_type() == wanted:
                    index = event.device_index()
                    peaks = found.setdefault(index, StepPeaks(start_bytes=self._starts.get(index)))
                    peaks.add(phase, event.nbytes())
            elif name.startswith(_MARK):
                phase = name.removeprefix(_MARK)
            elif phase == "forward" and name.startswith(_ENGINE):
                phase = "backward"
        return {"cpu" if wanted == DeviceType.CPU else f"cuda:{index}": peaks for index, peaks in found.items()}

    def abandon(self) -> None:
        """End a step that an error cut off."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
