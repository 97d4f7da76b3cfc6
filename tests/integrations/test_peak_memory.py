"""PeakMemoryCallback: its figures are those of `measure_peak_memory`, by phase, and reach the logs."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback, TrainerState
from transformers.integrations import integration_utils

from helpers import tiny_model
from hf_memeff import MespCallback, MespConfig, PeakMemoryCallback, SageConfig, measure_peak_memory
from hf_memeff.integrations import peak_memory, step_memory
from hf_memeff.integrations.step_memory import StepPeaks
from hf_memeff.memory import profiler_in_use
from integration._training import LORA, sft
from integrations._training import assert_same, logged, trained, trainer_for

MIB = 2**20
PHASES = ("forward", "backward", "optimizer")


class Spike(TrainerCallback):
    """Allocate and release 64 MiB in one phase of one step."""

    def __init__(self, phase, step):
        self.phase, self.step = phase, step

    def spike(self, *args):
        torch.ones(16 * MIB)

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step + 1 != self.step:
            return
        if self.phase == "forward":
            self.spike()
        if self.phase == "backward":
            parameter = next(p for p in model.parameters() if p.requires_grad)
            handle = parameter.register_hook(lambda gradient: (self.spike(), handle.remove())[1])

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.phase == "optimizer" and state.global_step + 1 == self.step:
            self.spike()


@pytest.mark.parametrize("config_class", [MespConfig, SageConfig])
def test_figures_are_those_of_measure_peak_memory_within_one_percent(tmp_path, config_class):
    callback = PeakMemoryCallback(every=2)
    trainer = trainer_for(tmp_path, [callback], config_class=config_class, max_steps=2)
    trainer.train()
    found = callback.steps[0].peaks["cpu"]

    model, optimizer = trainer.model.train(), trainer.optimizer
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(2)])

    def forward():
        return model(**batch).loss

    def step():
        forward().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def backward(loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    whole = measure_peak_memory(step, "cpu")
    model.zero_grad()
    ahead = measure_peak_memory(forward, "cpu")
    back = measure_peak_memory(lambda: backward(ahead.result), "cpu")
    update = measure_peak_memory(optimizer.step, "cpu").peak_bytes + ahead.held_bytes + back.held_bytes
    assert found.step_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert found.forward_bytes == pytest.approx(ahead.peak_bytes, rel=0.01)
    assert found.backward_bytes == pytest.approx(ahead.held_bytes + back.peak_bytes, rel=0.01)
    # the CPU's profiler does not see the release of a few small tensors that outlive a step, if it saw no earlier step
    assert found.optimizer_bytes == pytest.approx(update, abs=0.01 * whole.peak_bytes)


@pytest.mark.parametrize(("phase", "accumulation"), [("forward", 2), ("backward", 2), ("optimizer", 1)])
def test_c37_a_peak_is_seen_in_its_step_and_phase_and_kept_for_the_run(tmp_path, phase, accumulation):
    callback = PeakMemoryCallback(every=1)
    callbacks = [callback, Spike(phase, 2)] if phase != "optimizer" else [Spike(phase, 2), callback]
    trainer_for(tmp_path, callbacks, gradient_accumulation_steps=accumulation, max_steps=3).train()
    peaks = [step.peaks["cpu"] for step in callback.steps]
    assert [step.step for step in callback.steps] == [1, 2, 3]
    for name in PHASES:
        before, spiked, after = (getattr(peak, f"{name}_bytes") for peak in peaks)
        assert (64 * MIB <= spiked < 68 * MIB) == (name == phase) and before < 4 * MIB and after < 4 * MIB, name
    assert peaks[1].step_bytes >= 64 * MIB > peaks[2].step_bytes
    assert callback._run_bytes == {"cpu": peaks[1].step_bytes}


def test_values_are_logged_once_with_the_entry_that_follows(tmp_path):
    callback = PeakMemoryCallback(every=2)
    trainer = trainer_for(tmp_path, [Spike("optimizer", 2), callback])
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "memory/step_peak_gib" in entry] == [2, 4]
    for name in ("step", *PHASES):
        found = [getattr(step.peaks["cpu"], f"{name}_bytes") / 2**30 for step in callback.steps]
        assert logged(trainer, f"memory/{name}_peak_gib") == found and all(found)
    assert logged(trainer, "memory/run_peak_gib") == [logged(trainer, "memory/step_peak_gib")[0]] * 2
    assert not logged(trainer, "memory/allocated_peak_gib")  # not known on the CPU, so not there


class Reporter(TrainerCallback):
    """What TensorBoard or Weights & Biases would be handed."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_reporters_get_the_values(tmp_path, monkeypatch):
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    trainer = trainer_for(tmp_path, [], report_to="tensorboard")
    PeakMemoryCallback(every=2).add_to(trainer)
    trainer.train()
    reporters = [c for c in trainer.callback_handler.callbacks if isinstance(c, Reporter)]
    seen = [entry["memory/step_peak_gib"] for entry in reporters[0].seen if "memory/step_peak_gib" in entry]
    assert len(reporters) == 1 and seen == logged(trainer, "memory/step_peak_gib") and len(seen) == 2


def test_a_run_is_bit_for_bit_the_one_without_it(tmp_path):
    runs = []
    for folder, callbacks in {"without": [], "with": [PeakMemoryCallback(every=2)]}.items():
        trainer = trainer_for(tmp_path / folder, [MespCallback(), *callbacks], gradient_accumulation_steps=2)
        trainer.train()
        runs.append((trained(trainer), logged(trainer, "loss")))
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1]


def test_trl_s_trainer_with_its_own_defaults(tmp_path):
    callback = PeakMemoryCallback(every=2)
    sft(tmp_path, tiny_model(), MespConfig(**LORA), callbacks=[callback], max_steps=2).train()
    assert [step.step for step in callback.steps] == [2]
    assert all(step.peaks["cpu"].backward_bytes > step.peaks["cpu"].optimizer_bytes > 0 for step in callback.steps)


def test_off_while_another_profiler_records(tmp_path, caplog):
    callback = PeakMemoryCallback(every=1)
    trainer = trainer_for(tmp_path, [callback], max_steps=2)
    with caplog.at_level(logging.WARNING, "hf_memeff"), profile(activities=[ProfilerActivity.CPU]) as theirs:
        trainer.train()
    assert [(step.step, step.peaks) for step in callback.steps] == [(step, None) for step in (1, 2)]
    assert len(caplog.messages) == 1 and "step 1: another PyTorch profiler is in use" in caplog.messages[0]
    assert not logged(trainer, "memory/step_peak_gib")
    assert any(event.key == "aten::mm" for event in theirs.key_averages())


def test_off_in_the_steps_in_which_a_scheduled_profiler_warms_up_or_records(tmp_path):
    """In torch 2.13 a profiler that starts in the warm-up of another one ends the process."""
    theirs = []

    class Scheduled(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            kept = schedule(wait=1, warmup=1, active=1, repeat=1)
            self.trace = profile(activities=[ProfilerActivity.CPU], schedule=kept, on_trace_ready=self.keep)
            self.trace.start()

        def keep(self, trace):
            theirs.append(len(trace.events()))

        def on_step_end(self, args, state, control, **kwargs):
            self.trace.step()

        def on_train_end(self, args, state, control, **kwargs):
            self.trace.stop()

    for callbacks in ([PeakMemoryCallback(every=1), Scheduled()], [Scheduled(), PeakMemoryCallback(every=1)]):
        trainer_for(tmp_path, callbacks).train()
        ours = next(c for c in callbacks if isinstance(c, PeakMemoryCallback))
        assert [step.peaks is not None for step in ours.steps] == [True, False, False, True]
    assert len(theirs) == 2 and min(theirs) > 100


def test_an_error_in_a_measured_step_leaves_no_profiler_behind(tmp_path):
    class Broken(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            raise KeyError("mine")

    callback, broken = PeakMemoryCallback(every=1), Broken()
    trainer = trainer_for(tmp_path, [callback, broken], max_steps=2)
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    trainer.remove_callback(broken)
    trainer.train()
    assert [step.peaks is not None for step in callback.steps] == [True] * 2
    assert not profiler_in_use()


@pytest.mark.parametrize(("device", "n_gpu", "reason"), [("mps", 0, "no meter for mps"), ("cuda", 2, "DataParallel")])
def test_c37_none_only_where_nothing_can_be_measured(device, n_gpu, reason):
    callback, state = PeakMemoryCallback(every=1), TrainerState()
    arguments = SimpleNamespace(device=torch.device(device), n_gpu=n_gpu)
    events = "train_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "train_end"
    for event in events:
        getattr(callback, f"on_{event}")(arguments, state, None)
    logs = {"loss": 1.0}
    callback.on_log(arguments, state, None, logs)
    assert [(step.peaks, reason in step.reason) for step in callback.steps] == [(None, True)] and logs == {"loss": 1.0}


class FakeEvent:
    """A Kineto event."""

    def __init__(self, start, name, bytes_=0, index=0, device=DeviceType.CUDA):
        self.values = {"start_ns": start, "name": name, "nbytes": bytes_, "device_index": index, "device_type": device}

    def __getattr__(self, name):
        return lambda: self.values[name]


def test_cuda_devices_have_their_own_figures_and_no_counter_is_restarted(monkeypatch):
    """The trace and the allocator are replaced; `test_figures_on_a_gpu` has the real ones."""
    events = [
        FakeEvent(1, "[memory]", 100, 0),
        FakeEvent(2, "[memory]", 7000, 0, DeviceType.CPU),
        FakeEvent(9, "hf_memeff::step::optimizer"),
        FakeEvent(4, "autograd::engine::evaluate_function: MulBackward0"),
        FakeEvent(5, "[memory]", 50, 0),
        FakeEvent(3, "[memory]", -20, 0),
        FakeEvent(6, "[memory]", 30, 1),
        FakeEvent(10, "[memory]", 1, 0),
    ]

    class FakeTrace:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

        def __init__(self, **kwargs):
            assert kwargs["profile_memory"]

        def start(self):
            pass

        stop = start

    monkeypatch.setattr(step_memory, "profile", FakeTrace)
    monkeypatch.setattr(peak_memory, "profiler_in_use", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 1000 * (index + 1))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 9 * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *args: pytest.fail("a counter was restarted"))
    callback, state = PeakMemoryCallback(every=1), TrainerState()
    arguments = SimpleNamespace(device=torch.device("cuda", 0), n_gpu=1)
    for event in ("train_begin", "step_begin", "pre_optimizer_step", "optimizer_step"):
        getattr(callback, f"on_{event}")(arguments, state, None)
    first, second = callback.steps[0].peaks["cuda:0"], callback.steps[0].peaks["cuda:1"]
    assert (first.forward_bytes, first.backward_bytes, first.optimizer_bytes) == (100, 130, 131)
    assert (second.forward_bytes, second.backward_bytes, second.start_bytes) == (0, 30, 2000)
    logs = {}
    callback.on_log(arguments, state, None, logs)
    assert logs["memory/allocated_peak_gib/cuda:0"] * 2**30 == 1131 and logs["memory/max_reserved_gib/cuda:1"] == 9
    assert len(logs) == 14


@pytest.mark.gpu
def test_figures_on_a_gpu(tmp_path):
    callback = PeakMemoryCallback(every=4)
    trainer = trainer_for(tmp_path, [callback], config_class=MespConfig, use_cpu=False)
    earlier = torch.cuda.max_memory_allocated()
    trainer.train()
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(2)])

    def step():
        trainer.model(**{name: values.cuda() for name, values in batch.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()

    found = callback.steps[0].peaks["cuda:0"]
    assert torch.cuda.max_memory_allocated() >= earlier
    assert found.step_bytes == pytest.approx(measure_peak_memory(step, "cuda").peak_bytes, rel=0.01)


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "5"])
def test_a_wrong_interval_is_refused(every):
    with pytest.raises(ValueError, match=r"PeakMemoryCallback got every=.*expected an integer above 0\. Fix: "):
        PeakMemoryCallback(every=every)


def test_peaks_of_a_step_without_allocations_are_zero():
    assert StepPeaks().step_bytes == 0
