"""Sweeps: every method, budget and seed in each setting, on a tiny model; what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from hf_memeff.recipes import sweep
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.results import RESULTS_NAME, read_result
from hf_memeff.recipes.sweep import SWEEP_NAME, plan_runs, run_sweep
from hf_memeff.recipes.sweep_results import SweepRun, sweep_rows

RANDOM = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_hidden_layers": 3}


class Sweeps:
    """Writes a config for the tiny model and runs it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.fields: dict[str, Any] = {
            "model_name_or_path": str(model),
            "output_dir": str(folder / "out"),
            "dataset_train_rows": 8,
            "dataset_test_rows": 2,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.01,
            "bf16": False,
            "save_strategy": "no",
            "r": 4,
            "target_modules": "all-linear",
            "methods": ["lora", "mesp", "sage-random"],
            "budgets": [0.25],
            "seeds": [0, 1],
        }

    def config(self, **fields: Any) -> Path:
        path = self.folder / "sweep.yaml"
        path.write_text(yaml.safe_dump({**self.fields, **fields}), encoding="utf-8")
        return path

    def __call__(self, *words: str, **fields: Any) -> tuple[list[SweepRun], Path]:
        return run_sweep(self.config(**fields), words, say=self.said.append)


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Sweeps:
    return Sweeps(tmp_path_factory.mktemp("sweep"), tiny_folder)


@pytest.fixture(scope="module")
def runs(sweeps: Sweeps) -> list[SweepRun]:
    """Two settings of three methods and two seeds; the second has fewer of both."""
    changed = {"random_model": RANDOM, "methods": ["lora", "sage-random"], "seeds": [3]}
    done, path = sweeps(settings={"given": {}, "untrained": changed})
    assert path == sweeps.folder / "out" / SWEEP_NAME
    return done


def test_every_method_and_seed_runs_in_each_setting(sweeps: Sweeps, runs: list[SweepRun]) -> None:
    assert [(run.setting, run.method.name, run.result.seed) for run in runs] == [
        *(("given", name, seed) for seed in (0, 1) for name in ("lora", "mesp", "sage-random")),
        ("untrained", "lora", 3),
        ("untrained", "sage-random", 3),
    ]
    losses = {(run.setting, run.method.name, run.result.seed): run.result.evaluation["eval_loss"] for run in runs}
    for seed in (0, 1):
        exact, same, other = (losses["given", name, seed].adapter for name in ("lora", "mesp", "sage-random"))
        assert same == pytest.approx(exact, abs=1e-4)
        assert abs(other - exact) > 1e-4
        assert exact < losses["given", "lora", seed].base
    assert losses["given", "lora", 0].adapter != losses["given", "lora", 1].adapter
    assert len({loss.base for (setting, *_), loss in losses.items() if setting == "given"}) == 1
    assert losses["untrained", "lora", 3].base != losses["given", "lora", 0].base


def test_a_run_is_one_of_finetune_with_its_own_folder(sweeps: Sweeps, runs: list[SweepRun]) -> None:
    folder = sweeps.folder / "out" / "given" / "sage-random-0.25-seed1"
    found = read_result(folder)
    assert found == next(run.result for run in runs if run.method.name == "sage-random" and run.result.seed == 1)
    assert (found.method, found.settings["saliency"], found.settings["token_budget"]) == ("sage", "random", 0.25)
    assert [path.name for path in folder.iterdir()] == [RESULTS_NAME]  # no adapter was asked for
    assert found.peak_bytes is not None and found.seconds_per_step is not None
    untrained = read_result(sweeps.folder / "out" / "untrained" / "lora-seed3")
    assert untrained.base_model.startswith("llama of random weights, ") and "hidden_size 16" in untrained.base_model
    assert sum("seed 1" in line for line in sweeps.said) == 3


def test_the_file_has_rows_and_runs(sweeps: Sweeps, runs: list[SweepRun]) -> None:
    text = (sweeps.folder / "out" / SWEEP_NAME).read_text(encoding="utf-8")
    content = json.loads(text)
    assert str(sweeps.folder) not in text
    assert len(content["runs"]) == 8 and len(content["rows"]) == 5
    rows = sweep_rows(runs)
    assert [row["metrics"]["eval_loss"]["mean"] for row in content["rows"]] == [
        row.metrics["eval_loss"].mean for row in rows
    ]
    assert content["runs"][2]["setting"] == "given" and content["runs"][2]["title"] == "SAGE, random, 0.25"


def test_what_is_done_is_not_done_again(sweeps: Sweeps, runs: list[SweepRun], monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[float] = []
    whole = sweep.train

    def counted(plan: Any, *arguments: Any, **named: Any) -> Any:
        trained.append(plan.training.learning_rate)
        return whole(plan, *arguments, **named)

    monkeypatch.setattr(sweep, "train", counted)
    words = ["--methods", "lora", "--seeds", "1"]
    again, _ = sweeps(*words, settings={"given": {}})
    assert trained == [] and again == [run for run in runs if run.setting == "given"][3:4]
    kept, _ = sweeps(*words, "--learning_rate", "0.02", "--keep_adapters", "true", settings={"given": {}})
    assert trained == [0.02] and kept != again
    assert (sweeps.folder / "out" / "given" / "lora-seed1" / "adapter_model.safetensors").is_file()


def test_a_setting_wins_over_the_command_line(sweeps: Sweeps) -> None:
    settings = {"short": {"max_steps": 1, "model_name_or_path": "elsewhere"}, "long": {}}
    planned = plan_runs(sweeps.config(settings=settings), ["--max-steps", "7", "--model=here", "--seed", "9"])
    assert {run.plan.training.max_steps for run in planned["short"]} == {1}
    assert {run.plan.run.model_name_or_path for run in planned["short"]} == {"elsewhere"}
    assert {run.plan.training.max_steps for run in planned["long"]} == {7}
    assert {run.plan.run.model_name_or_path for run in planned["long"]} == {"here"}
    assert [run.plan.training.seed for run in planned["long"]] == [0, 0, 0, 1, 1, 1]


def test_checkpointing_is_on_where_it_is_named(sweeps: Sweeps) -> None:
    planned = plan_runs(sweeps.config(methods=["lora", "lora-checkpointing", "mesp"]))["main"]
    assert [run.plan.training.gradient_checkpointing for run in planned[:3]] == [False, True, False]
    assert [run.plan.run.method for run in planned[:3]] == ["lora", "lora", "mesp"]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"method": "sage", "saliency": "losss"}, "saliency"),
        ({"dataset_name": "TEXTS"}, "without a test split"),
        ({"random_model": {"hiden_size": 4}}, "hiden_size, expected fields of LlamaConfig"),
        ({"settings": {"later": {"dataset_name": "gone.jsonl"}}}, "gone.jsonl"),
        ({"settings": {"later": {"max_length": 9}}}, "longer than 9"),
        ({"settings": {"later": {"max_step": 9}}}, "'max_steps'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_loads(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], part: str
) -> None:
    texts = sweeps.folder / "texts.jsonl"
    texts.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    for name in ("load_base", "train"):
        monkeypatch.setattr(sweep, name, lambda *args, **kwargs: pytest.fail("work began"))
    with pytest.raises(RecipeError, match=part):
        sweeps(**{name: str(texts) if value == "TEXTS" else value for name, value in fields.items()})


def test_dpo_has_its_rewards_and_one_bar(sweeps: Sweeps, capfd: pytest.CaptureFixture[str]) -> None:
    datasets.enable_progress_bars()  # other tests may have left them off
    done, _ = sweeps(trainer="dpo", methods=["sage-random"], seeds=[0], output_dir=str(sweeps.folder / "dpo"))
    assert done[0].result.evaluation["eval_loss"].base == pytest.approx(0.693147, abs=1e-4)
    assert sweep_rows(done)[0].metrics["eval_rewards/margins"].mean != 0
    shown = capfd.readouterr()
    assert "main, SAGE, random, 0.25, seed 0, step 2 of 2" in shown.err and "{'" not in shown.out
    assert not datasets.are_progress_bars_disabled()
