"""MeZO and MUZO against MeSP: the same start, no more memory, and the example's small version."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from hf_memeff.recipes import mezo_baselines
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.mezo_baselines import BaselineArguments, BaselineRun, baselines_table, run_baselines
from hf_memeff.recipes.model_source import ModelUnavailableError, find_smollm2
from hf_memeff.recipes.parsing import parse_plan
from recipes._examples import EXAMPLES, commands_of, example

FIELDS = {
    "max_steps": 2,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 2,
    "learning_rate": 0.01,
    "dataset_train_rows": 8,
    "dataset_test_rows": 2,
    "bf16": False,
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "r": 4,
    "target_modules": "all-linear",
    "mezo_steps": 3,
    "mezo_learning_rate": 0.01,
    "muzo_queries": 2,
    "largest_batch": 8,
}


def config(folder: Path, model: Path, **fields: Any) -> Path:
    path = folder / "mezo.yaml"
    content = {"model_name_or_path": str(model), "output_dir": str(folder / "out"), **FIELDS, **fields}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[list[BaselineRun], Path]:
    datasets.disable_progress_bars()
    return run_baselines(config(tmp_path_factory.mktemp("mezo"), tiny_folder), say=lambda line: None)


def test_all_start_alike_and_move(done: tuple[list[BaselineRun], Path]) -> None:
    runs, _ = done
    assert [run.method for run in runs] == ["mesp", "mezo", "muzo"]
    assert [run.steps for run in runs] == [2, 3, 3]
    assert [run.queries for run in runs] == [None, 1, 2]
    for run in runs:
        assert run.loss_before == pytest.approx(runs[0].loss_before, rel=1e-5)
        assert run.loss_after != run.loss_before
        assert [point.step for point in run.loss_curve] == list(range(1, run.steps + 1))


def test_mezo_and_muzo_take_no_more_memory_than_mesp(done: tuple[list[BaselineRun], Path]) -> None:
    mesp, mezo, muzo = done[0]
    assert mezo.memory_bytes <= mesp.memory_bytes and muzo.memory_bytes <= mesp.memory_bytes
    assert (mezo.state_bytes, muzo.state_bytes) == (0, mesp.state_bytes)
    assert mesp.state_bytes > 0
    assert mezo.rows in (1, 2, 4, 8) and mezo.rows >= muzo.rows


def test_results_and_table_hold_the_runs(done: tuple[list[BaselineRun], Path]) -> None:
    runs, path = done
    content = json.loads(path.read_text(encoding="utf-8"))
    assert [entry["loss_after"] for entry in content["runs"]] == [run.loss_after for run in runs]
    assert content["environment"]["versions"] and content["dataset"]["name"] == "hf_memeff order tickets"
    assert str(path.parent) not in path.read_text(encoding="utf-8")
    lines = baselines_table(runs).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| MeSP", "| MeZO", "| MUZO"]
    assert f"{runs[1].loss_after:.4f}" in lines[3] and " 4 |" in lines[4]  # two directions, twice evaluated


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"trainer": "dpo"}, "trainer: dpo with method: mesp"),
        ({"method": "lora"}, "method: lora, expected sft with mesp"),
        ({"muzo_queries": 0}, "muzo_queries: 0"),
        ({"largest_batch": 0}, "largest_batch: 0"),
        ({"mezo_lerning_rate": 1e-5}, "'mezo_learning_rate'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_loads(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], part: str
) -> None:
    monkeypatch.setattr(mezo_baselines, "load_base", lambda *arguments: pytest.fail("work began"))
    with pytest.raises(RecipeError, match=part):
        run_baselines(config(tmp_path, tiny_folder, **fields))


def test_the_example_and_its_commands_parse() -> None:
    commands = commands_of("mezo_baselines")
    assert len(commands) == 2
    for words in commands:
        plan = parse_plan(EXAMPLES / "mezo_baselines.yaml", words, own=BaselineArguments)
        assert (plan.run.trainer, plan.run.method) == ("sft", "mesp")
    assert plan.own.mezo_steps == 20000 and plan.own.mezo_learning_rate == 5e-5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_s_small_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_smollm2(allow_download=False)
    except ModelUnavailableError:
        pytest.skip("SmolLM2 is not on this machine")
    runpy.run_path(str(example("mezo_baselines")))["main"](["--output_dir", str(tmp_path)])
    assert "MUZO's settings are our own" in capsys.readouterr().out
    content = json.loads((tmp_path / mezo_baselines.RESULTS_NAME).read_text(encoding="utf-8"))
    mesp, mezo, muzo = content["runs"]
    assert mesp["loss_after"] < mesp["loss_before"] - 0.05
    assert mesp["loss_after"] < min(mezo["loss_after"], muzo["loss_after"])
    assert mezo["peak_bytes"] <= mesp["peak_bytes"] + mesp["state_bytes"]
