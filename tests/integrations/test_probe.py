"""GradientProbeCallback: what it measures, and that the run doesn't notice."""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from helpers import loss_and_gradients, token_batch
from hf_memeff import GradientProbeCallback, MespConfig, SageBudgetCallback, SageCallback, SageConfig
from hf_memeff.tuners.budget import token_budget_of
from integrations._training import assert_same, logged, rows, trained, trainer_for

COSINE, RATIO = "sage/gradient_cosine", "sage/gradient_norm_ratio"


class Noisy(Dataset):
    """Rows whose making draws random numbers of every kind."""

    def __init__(self):
        self.rows = rows(8)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        random.random()
        np.random.rand()
        torch.rand(3)
        return self.rows[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(8))


def run(folder, callbacks=(), budget=0.25, config=None, **settings):
    fields = {"token_budget": budget, "sink_tokens": 1, "dense_layers": (), **(config or {})}
    trainer = trainer_for(folder, list(callbacks), SageConfig, fields, **settings)
    trainer.train()
    return trainer


# what it measures


def test_at_budget_1_the_gradient_is_the_exact_one(tmp_path):
    trainer = run(tmp_path, [GradientProbeCallback(every=2)], budget=1.0)
    assert logged(trainer, COSINE) == pytest.approx([1.0, 1.0], abs=1e-9)
    assert logged(trainer, RATIO) == pytest.approx([1.0, 1.0], abs=1e-9)


def test_at_a_small_budget_it_is_not_and_a_larger_one_is_closer(tmp_path):
    found = {}
    for budget in (0.1, 0.75):
        trainer = run(tmp_path / str(budget), [GradientProbeCallback(every=4, rows=8)], budget=budget)
        found[budget] = logged(trainer, COSINE)[0]
    assert 0.0 < found[0.1] < found[0.75] < 0.9999


def test_the_numbers_are_those_of_two_whole_gradients(tmp_path):
    """Against `.backward()` on the parameters of the moment, with exact gradients from MeSP's engine."""
    batch = token_batch(rows=3, padding="right")
    probe = GradientProbeCallback(every=4, batches=batch)
    trainer = run(tmp_path, [probe])
    gradients = []
    for config in (SageConfig(token_budget=0.25, sink_tokens=1, dense_layers=()), MespConfig()):
        twin = trainer_for(tmp_path, [], type(config), {} if isinstance(config, MespConfig) else vars_of(config)).model
        twin.load_state_dict(trainer.model.state_dict())
        found = loss_and_gradients(twin, batch)[1]
        gradients.append(torch.cat([value.flatten() for value in found.values()]))
    sage, exact = gradients
    (measured,) = probe.probes
    assert measured.step == 4
    assert measured.cosine == pytest.approx((sage @ exact / sage.norm() / exact.norm()).item(), abs=1e-5)
    assert measured.norm_ratio == pytest.approx((sage.norm() / exact.norm()).item(), abs=1e-5)
    assert measured.cosine < 0.99


def vars_of(config):
    return {name: getattr(config, name) for name in ("token_budget", "sink_tokens", "dense_layers")}


def test_several_batches_are_averaged(tmp_path):
    batches = [token_batch(seed=seed) for seed in (1, 2)]
    single = [GradientProbeCallback(every=4, batches=batch) for batch in batches]
    both = GradientProbeCallback(every=4, batches=batches)
    run(tmp_path, [*single, both])
    expected = sum(probe.probes[0].cosine for probe in single) / 2
    assert both.probes[0].cosine == pytest.approx(expected, abs=1e-12)
    assert single[0].probes[0].cosine != single[1].probes[0].cosine


def test_it_probes_the_annealed_budget(tmp_path):
    probe = GradientProbeCallback(every=1)
    run(tmp_path, [SageBudgetCallback(1.0, 0.1), probe])
    assert probe.probes[0].cosine == pytest.approx(1.0, abs=1e-9) and probe.probes[-1].cosine < 0.99


def test_a_gradient_of_zero_gives_no_number(tmp_path):
    for name, parameter in (trainer := trainer_for(tmp_path, [], SageConfig)).model.named_parameters():
        if "lora_" in name:
            parameter.data.zero_()
    probe = GradientProbeCallback(every=1, batches=token_batch())
    probe.on_train_begin(trainer.args, trainer.state, trainer.control)
    probe.on_step_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert math.isnan(probe.probes[0].cosine)


# when, and on what


def test_every_n_steps_is_logged_once(tmp_path):
    probe = GradientProbeCallback(every=2)
    trainer = run(tmp_path, [probe], max_steps=5)
    entries = [entry["step"] for entry in trainer.state.log_history if COSINE in entry]
    assert entries == [2, 4] == [measured.step for measured in probe.probes]


def test_between_two_log_entries_the_latest_probe_counts_and_all_are_kept(tmp_path):
    probe = GradientProbeCallback(every=1)
    trainer = run(tmp_path, [probe], logging_steps=4)
    assert logged(trainer, COSINE) == [probe.probes[-1].cosine] and len(probe.probes) == 4


def first_rows(count):
    data = rows(8)[:count]
    return {name: torch.stack([row[name] for row in data]) for name in data[0]}


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 2), ({"rows": 3}, 3), ({"rows": 99}, 8), ({"batches": Noisy()}, 2), ({"batches": Noisy(), "rows": 4}, 4)],
)
def test_the_rows_are_the_first_of_the_dataset(tmp_path, settings, count):
    by_rows = GradientProbeCallback(every=4, **settings)
    by_batch = GradientProbeCallback(every=4, batches=first_rows(count))
    run(tmp_path, [by_rows, by_batch])
    assert by_rows.probes == by_batch.probes


# the run does not notice


SETTINGS = {
    "attention": {},
    "gradient": {"config": {"saliency": "gradient"}},
    "random": {"config": {"saliency": "random"}},
    "value_norm": {"config": {"saliency": "value_norm"}},
    "all keys": {"config": {"backward_keys": "all"}},
    "dropout": {"config": {"lora_dropout": 0.2}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "random data": {"data": Noisy()},
    "iterable data": {"data": Stream()},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_run_is_bit_for_bit_the_same(tmp_path, name):
    settings = SETTINGS[name]
    batches = token_batch(seed=9) if name == "iterable data" else None
    probe = GradientProbeCallback(every=1, batches=batches)
    runs = []
    for folder, callbacks in {"without": [], "with": [probe]}.items():
        trainer = run(tmp_path / folder, callbacks, **settings)
        numbers = random.random(), np.random.rand(), torch.rand(1).item()
        runs.append((trained(trainer), logged(trainer, "loss"), logged(trainer, "grad_norm"), numbers))
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1:] == runs[0][1:]
    assert len(probe.probes) == 4 and all(0 < measured.cosine < 1 for measured in probe.probes)


def test_gradients_modes_and_budget_are_left_as_they_were(tmp_path):
    trainer = trainer_for(tmp_path, [], SageConfig, {"token_budget": 0.25})
    model = trainer.model.train()
    frozen = model.base_model.model.model.layers[0].mlp
    for module in frozen.modules():
        module.training = False
    model(**token_batch()).loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    modes = [module.training for module in model.modules()]
    hooks = []
    next(p for p in model.parameters() if p.requires_grad).register_post_accumulate_grad_hook(hooks.append)
    for change in (lambda: None, model.eval):
        change()
        modes = [module.training for module in model.modules()]
        probe = GradientProbeCallback(every=1, batches=token_batch(seed=9))
        probe.on_train_begin(trainer.args, trainer.state, trainer.control)
        probe.on_step_end(trainer.args, trainer.state, trainer.control, model=model)
        assert probe.probes[0].cosine < 0.999
        assert modes == [module.training for module in model.modules()]
        assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, before)
        assert token_budget_of(model) == 0.25 and not hooks


def test_the_budget_comes_back_when_the_probe_fails(tmp_path):
    trainer = trainer_for(
        tmp_path,
        [GradientProbeCallback(every=1, batches={"input_ids": token_batch()["input_ids"]})],
        SageConfig,
        {"token_budget": 0.25},
    )
    with pytest.raises(ValueError, match=r"got no loss from the model for a batch of input_ids, expected one\. Fix: "):
        trainer.train()
    assert token_budget_of(trainer.model) == 0.25


def test_it_works_with_sage_attached_by_callback(tmp_path):
    probe = GradientProbeCallback(every=4)
    trainer_for(tmp_path, [SageCallback(token_budget=0.1, dense_layers=()), probe]).train()
    assert probe.probes[0].cosine < 0.99


# what it refuses


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"every": -1},
        {"every": 2.0},
        {"every": True},
        {"every": None},
        {"rows": 0},
        {"rows": "2"},
        {"batches": []},
        {"batches": {}},
        {"batches": [1, 2]},
        {"batches": rows(2)},
        {"batches": {"input_ids": [[1, 2]]}},
        {"batches": token_batch(), "rows": 2},
    ],
)
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=rf"GradientProbeCallback got .*{next(iter(wrong))}.*, expected .* Fix: "):
        GradientProbeCallback(**wrong)


def test_an_iterable_dataset_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"got a Stream to take rows from, expected a dataset with a length.*Fix: "):
        run(tmp_path, [GradientProbeCallback()], data=Stream())


@pytest.mark.parametrize("setting", ["fsdp", "deepspeed"])
def test_sharded_parameters_are_refused(tmp_path, setting):
    trainer = trainer_for(tmp_path, [], SageConfig)
    setattr(trainer.args, setting, "full_shard")
    with pytest.raises(ValueError, match=r"parameters are sharded over processes .*, expected whole .*Fix: "):
        GradientProbeCallback().on_train_begin(trainer.args, trainer.state, trainer.control)


def test_a_model_without_sage_is_refused(tmp_path):
    trainer = trainer_for(tmp_path, [GradientProbeCallback(every=1)], MespConfig)
    with pytest.raises(ValueError, match=r"GradientProbeCallback got a model that doesn't run with SAGE.*Fix: "):
        trainer.train()


def test_an_adaptive_budget_is_probed_and_kept(tmp_path):
    probe = GradientProbeCallback(every=4)
    trainer = run(tmp_path, [probe], budget="adaptive")
    assert len(probe.probes) == 1 and token_budget_of(trainer.model) == "adaptive"
