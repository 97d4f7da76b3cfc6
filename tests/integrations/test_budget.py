"""SageBudgetCallback: the schedule, and what it does to a run."""

import math
from typing import ClassVar

import pytest
import torch
from transformers import TrainerCallback

from hf_memeff import MespCallback, MespConfig, SageBudgetCallback, SageCallback, SageConfig
from hf_memeff.tuners.budget import token_budget_of
from integrations._training import assert_same, logged, trained, trainer_for

NAN = float("nan")


class Budgets(TrainerCallback):
    """Note the budget that each step runs with."""

    def __init__(self):
        self.seen = []

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.seen.append(token_budget_of(model))


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        ({}, [1.0, 0.8125, 0.625, 0.4375, 0.25]),
        ({"start": 0.2, "end": 1.0}, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ({"begin_fraction": 0.25, "end_fraction": 0.75}, [1.0, 1.0, 0.625, 0.25, 0.25]),
        ({"end_fraction": 0.5}, [1.0, 0.625, 0.25, 0.25, 0.25]),
        ({"begin_fraction": 0.5}, [1.0, 1.0, 1.0, 0.625, 0.25]),
        ({"start": 1.0, "end": 0.5, "schedule": "cosine"}, [1.0, 1 - (1 - math.sqrt(0.5)) / 4, 0.75, 0.5732233, 0.5]),
        ({"start": 0.5, "end": 0.5}, [0.5] * 5),
    ],
)
def test_the_schedule(settings, budgets):
    callback = SageBudgetCallback(**settings)
    assert [callback.budget(step, 4) for step in range(5)] == pytest.approx(budgets)
    assert callback.budget(4, 4) == callback.end and callback.budget(0, 4) == callback.start


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_budget_of_a_long_run_is_one_that_the_engine_takes(schedule):
    callback = SageBudgetCallback(start=0.1, end=1.0, schedule=schedule, begin_fraction=0.1, end_fraction=0.7)
    budgets = [callback.budget(step, 997) for step in range(998)]
    assert budgets == sorted(budgets) and budgets[0] == 0.1 and budgets[-1] == 1.0


@pytest.mark.parametrize("attach", [True, False], ids=["callback", "config"])
def test_each_step_runs_with_its_budget_and_the_model_s_own_comes_back(tmp_path, attach):
    budgets = Budgets()
    callbacks = [SageBudgetCallback(1.0, 0.2), budgets]
    if attach:  # in whatever order they are listed
        callbacks.append(SageCallback())
    config_class = {} if attach else {"config_class": SageConfig}
    trainer = trainer_for(tmp_path, callbacks, **config_class)
    trainer.train()
    assert budgets.seen == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert logged(trainer, "sage/token_budget")[:4] == pytest.approx(budgets.seen)
    assert token_budget_of(trainer.model) == (None if attach else 0.5)
    trainer.train()
    assert budgets.seen == pytest.approx([1.0, 0.8, 0.6, 0.4] * 2)


def test_the_saved_config_keeps_its_own_budget(tmp_path):
    trainer = trainer_for(
        tmp_path, [SageBudgetCallback()], config_class=SageConfig, save_strategy="steps", save_steps=2
    )
    trainer.train()
    assert SageConfig.from_pretrained(tmp_path / "checkpoint-2").token_budget == 0.5


def test_annealing_changes_what_is_learnt(tmp_path):
    runs = []
    for name, callbacks in {"fixed": [], "annealed": [SageBudgetCallback(1.0, 0.1)]}.items():
        trainer = trainer_for(tmp_path / name, callbacks, config_class=SageConfig, config={"token_budget": 0.1})
        trainer.train()
        runs.append(trained(trainer))
    assert any(not torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path):
    def run(folder, checkpoint=None):
        callbacks = [SageCallback(), SageBudgetCallback(1.0, 0.1, schedule="cosine")]
        trainer = trainer_for(folder, callbacks, save_strategy="steps", save_steps=1)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(trained(resumed), trained(whole))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert logged(resumed, "sage/token_budget") == logged(whole, "sage/token_budget")


def test_callbacks_that_come_later_see_the_budget_in_the_logs(tmp_path):
    class Reader(TrainerCallback):
        seen: ClassVar[list] = []

        def on_log(self, args, state, control, logs, **kwargs):
            self.seen.append(logs.get("sage/token_budget"))

    trainer_for(tmp_path, [SageBudgetCallback(0.5, 0.5), Reader()], config_class=SageConfig).train()
    assert set(Reader.seen[:4]) == {0.5}


@pytest.mark.parametrize("kind", ["lora", "mesp", "mesp_callback"])
def test_a_model_without_sage_is_refused(tmp_path, kind):
    callbacks = [MespCallback()] if kind == "mesp_callback" else []
    config_class = {"config_class": MespConfig} if kind == "mesp" else {}
    trainer = trainer_for(tmp_path, [*callbacks, SageBudgetCallback()], **config_class)
    with pytest.raises(ValueError, match=r"SageBudgetCallback got a model that doesn't run with SAGE, expected.*Fix: "):
        trainer.train()


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 0},
        {"start": 1.1},
        {"start": NAN},
        {"end": 0.0},
        {"end": -0.1},
        {"end": True},
        {"end": "adaptive"},
        {"end": None},
        {"schedule": "step"},
        {"schedule": None},
        {"begin_fraction": -0.1},
        {"begin_fraction": 1.0},
        {"begin_fraction": NAN},
        {"end_fraction": 0.0},
        {"end_fraction": 1.5},
        {"begin_fraction": 0.5, "end_fraction": 0.5},
        {"end_fraction": "1"},
    ],
)
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=rf"SageBudgetCallback got .*{next(iter(wrong))}=.*, expected .* Fix: "):
        SageBudgetCallback(**wrong)


def test_an_adaptive_budget_comes_back_after_training(tmp_path):
    trainer = trainer_for(
        tmp_path, [SageBudgetCallback()], config_class=SageConfig, config={"token_budget": "adaptive"}
    )
    trainer.train()
    assert token_budget_of(trainer.model) == "adaptive"


def test_after_an_interrupted_run_the_next_one_ends_with_the_config_s_budget(tmp_path):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = trainer_for(
        tmp_path, [SageBudgetCallback(), Interrupt()], config_class=SageConfig, config={"token_budget": 0.5}
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert token_budget_of(trainer.model) != 0.5
    trainer.callback_handler.callbacks = [
        c for c in trainer.callback_handler.callbacks if not isinstance(c, (Interrupt, SageBudgetCallback))
    ]
    trainer.add_callback(SageBudgetCallback())
    trainer.train()
    assert token_budget_of(trainer.model) == 0.5
