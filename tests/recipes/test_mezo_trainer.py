"""MezoTrainer: the written-out update, a falling loss, resuming, what it stores, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_memeff.recipes import mezo_trainer
from hf_memeff.recipes.mezo import SlopeEstimate
from hf_memeff.recipes.mezo_trainer import MezoConfig, MezoTrainer

ROWS = 32


class Regression(nn.Module):
    """``x W^T + b`` and its squared error; notes the mode of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.modes: list[bool] = []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.modes.append(self.training)
        return {"loss": (self.linear(x) - y).square().mean()}


def make_trainer(folder: Path, **settings: Any) -> MezoTrainer:
    torch.manual_seed(0)
    model = Regression()
    x = torch.randn(ROWS, 4)
    rows = [{"x": a, "y": torch.stack([a.sum(), a[0] - 2 * a[1]])} for a in x]
    fixed = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    fields = {"max_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 0.02, "epsilon": 1e-3}
    arguments = MezoConfig(str(folder), **{**fixed, **fields, **settings})
    return MezoTrainer(model, arguments, train_dataset=rows)


def weights(trainer: MezoTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def losses(trainer: MezoTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[SlopeEstimate]:
    """The estimates of a run, noted as they are made."""
    found: list[SlopeEstimate] = []
    whole = mezo_trainer.estimate_slope

    def noted(*arguments: Any) -> SlopeEstimate:
        found.append(whole(*arguments))
        return found[-1]

    monkeypatch.setattr(mezo_trainer, "estimate_slope", noted)
    return found


@pytest.mark.parametrize("parts", [1, 2])
def test_the_update_is_the_written_out_one(parts: int, tmp_path: Path, estimates: list[SlopeEstimate]) -> None:
    settings = {"queries": 3, "learning_rate": 0.1, "weight_decay": 0.5, "gradient_accumulation_steps": parts}
    trainer = make_trainer(tmp_path, per_device_train_batch_size=ROWS // parts, **settings)
    weight, bias = (p.detach().clone() for p in trainer.model.parameters())
    trainer.train()

    assert len({estimate.seed for estimate in estimates}) == len(estimates) == 3 * parts
    expected_weight, expected_bias = weight * (1 - 0.1 * 0.5), bias.clone()  # biases do not decay in the Trainer
    for estimate in estimates:
        generator = torch.Generator().manual_seed(estimate.seed)
        z_weight, z_bias = (torch.randn(p.shape, generator=generator) for p in (weight, bias))
        expected_weight -= 0.1 * estimate.slope / 3 * z_weight
        expected_bias -= 0.1 * estimate.slope / 3 * z_bias
        if parts == 1:  # the batch is all rows
            x, y = (torch.stack([row[name] for row in trainer.train_dataset]) for name in ("x", "y"))
            error = x @ weight.t() + bias - y
            along = (error * (x @ z_weight.t() + z_bias)).mean() * 2
            assert estimate.slope == pytest.approx(along.item(), rel=1e-2)
    torch.testing.assert_close(trainer.model.linear.weight.detach(), expected_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trainer.model.linear.bias.detach(), expected_bias, rtol=1e-5, atol=1e-6)
    if parts == 2:  # each half is a part of the loss
        assert losses(trainer)[0] == pytest.approx(sum(e.loss for e in estimates) / 3, rel=1e-3)


@pytest.mark.parametrize("method", ["mezo", "muzo"])
def test_the_loss_falls_and_mezo_stores_nothing(method: str, tmp_path: Path) -> None:
    muzo = {"optim": "adamw_torch", "queries": 4, "learning_rate": 0.05}
    trainer = make_trainer(tmp_path, max_steps=80, **(muzo if method == "muzo" else {}))
    trainer.train()
    course = losses(trainer)
    assert sum(course[-8:]) < 0.5 * sum(course[:8])
    assert not any(trainer.model.modes) and trainer.model.training  # dropout would be off, and is on again
    state = trainer.optimizer.state_dict()["state"]
    assert (state == {}) == (method == "mezo")
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_a_resumed_run_ends_where_a_run_in_one_piece_does(optim: str, tmp_path: Path) -> None:
    settings = {"optim": optim, "max_steps": 6, "queries": 2, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert torch.equal(weights(resumed), weights(whole))
    other = make_trainer(tmp_path / "other", seed=1, **settings)
    other.train()
    assert not torch.equal(weights(other), weights(whole))


def test_what_an_interrupted_run_left_is_forgotten(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer._take(SlopeEstimate(seed=1, slope=1e9, loss=0.0), [])
    trainer.train()
    assert weights(trainer).abs().max() < 10


def test_defaults_are_mezo_s_published_settings_for_lora() -> None:
    """large_models/README.md and mezo.sh of princeton-nlp/MeZO."""
    config = MezoConfig("unused", use_cpu=True)
    found = config.learning_rate, config.epsilon, config.queries, config.per_device_train_batch_size, config.max_steps
    assert found == (5e-5, 1e-2, 1, 16, 20000)
    assert config.lr_scheduler_type == "constant" and config.stores_nothing
    assert not MezoConfig("unused", use_cpu=True, optim="adamw_torch").stores_nothing


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"queries": 0}, "queries=0"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0"),
        ({"fp16": True}, "(?i)fp16"),
    ],
)
def test_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        MezoConfig("unused", use_cpu=True, **settings)


def test_muzo_may_clip() -> None:
    assert MezoConfig("unused", use_cpu=True, optim="adamw_torch", max_grad_norm=1.0).max_grad_norm == 1.0
