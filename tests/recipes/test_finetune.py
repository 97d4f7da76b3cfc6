"""`hf-memeff finetune` from end to end on a tiny random model, and once on the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from safetensors.torch import load_file

from helpers import run_python
from hf_memeff import cli
from hf_memeff.benchmarks.results import ResultsError
from hf_memeff.recipes import finetune as recipe
from hf_memeff.recipes import learning_curve
from hf_memeff.recipes.card import CardOptions, write_card
from hf_memeff.recipes.card_fields import CardError
from hf_memeff.recipes.errors import RecipeError, require_packages
from hf_memeff.recipes.finetune import CURVE_NAME, finetune
from hf_memeff.recipes.model_source import ModelUnavailableError, find_smollm2, load_model, load_tokenizer
from hf_memeff.recipes.results import RESULTS_NAME, RunResult, read_result
from hf_memeff.recipes.training_data import load_data

ADAPTER = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def quiet() -> None:
    """No bars of `datasets`."""
    datasets.disable_progress_bars()


class Runner:
    """Writes a config for the tiny model and runs it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.fields: dict[str, Any] = {
            "model_name_or_path": str(model),
            "dataset_train_rows": 12,
            "dataset_test_rows": 3,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "logging_steps": 1,
            "learning_rate": 0.01,
            "bf16": False,
            "disable_tqdm": True,
            "save_strategy": "no",
            "r": 4,
            "target_modules": "all-linear",
        }

    def config(self, name: str, **fields: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        content = {**self.fields, "output_dir": str(self.folder / name), **fields}
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def __call__(self, name: str, *words: str, dry_run: bool = False, **fields: Any) -> Any:
        return finetune(self.config(name, **fields), words, dry_run=dry_run, say=self.said.append)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / ADAPTER)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"), tiny_folder)


@pytest.fixture(scope="module")
def trained(run: Runner) -> RunResult:
    """Four steps of SFT with MeSP."""
    datasets.disable_progress_bars()
    return run("sft", metrics=["exact_match"], max_new_tokens=4, save_strategy="steps", save_steps=2, license="mit")


def test_a_run_leaves_its_results(run: Runner, trained: RunResult) -> None:
    folder = run.folder / "sft"
    assert read_result(folder) == trained
    assert (trained.trainer, trained.method, trained.exact, trained.seed) == ("sft", "mesp", True, 42)
    assert (trained.base_model, trained.base_revision, trained.license) == ("model", None, "mit")
    assert trained.settings["target_modules"] == "all-linear" and trained.settings["r"] == 4
    assert trained.training_arguments["max_steps"] == 4 and "output_dir" not in trained.training_arguments
    assert [point.step for point in trained.train.loss_curve] == [1, 2, 3, 4]
    assert trained.train.steps == 4 and trained.train.resumed_at is None
    loss = trained.evaluation["eval_loss"]
    assert loss.adapter < loss.base - 0.01
    assert set(trained.evaluation) >= {"exact_match", "eval_mean_token_accuracy"}
    assert not any("runtime" in name or "per_second" in name for name in trained.evaluation)
    assert trained.measured_steps == (2, 4) and trained.peak_bytes is not None and trained.peak_bytes > 2**16
    assert trained.seconds_per_step is not None and 0 < trained.seconds_per_step < trained.train.seconds
    assert {"trl", "datasets", "evaluate", "torch"} <= set(trained.environment.versions)
    assert str(run.folder) not in (folder / RESULTS_NAME).read_text(encoding="utf-8")
    assert (folder / CURVE_NAME).read_text(encoding="utf-8").startswith("<?xml")


def test_an_adapter_loads_in_stock_peft(run: Runner, trained: RunResult) -> None:
    """In a process where this package cannot be imported; the loss is the one that the run reports."""
    rows = load_data(recipe.parse_plan(run.config("sft")).run).test
    code = f"""
import torch, sys
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained({str(run.folder / "sft")!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({str(run.folder / "sft")!r})
total = count = 0
for prompt, answer in {list(zip(rows["prompt"], rows["completion"], strict=True))!r}:
    start = len(tokenizer(prompt).input_ids)
    ids = torch.tensor([tokenizer(prompt + answer + tokenizer.eos_token).input_ids])
    logits = model(ids).logits[0, start - 1 : -1]
    total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
    count += ids.shape[1] - start
assert sys.modules["hf_memeff"] is None
print(total / count)
"""
    done = run_python(code, hide_package=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found, loss = float(done.stdout.strip().splitlines()[-1]), trained.evaluation["eval_loss"]
    assert found == pytest.approx(loss.adapter, abs=2e-3)  # the trainer's is a mean over batches
    assert abs(found - loss.adapter) < abs(found - loss.base) / 10


def test_the_card_is_rendered_from_what_a_run_leaves(run: Runner, trained: RunResult, tmp_path: Path) -> None:
    shutil.copytree(run.folder / "sft", tmp_path / "sft", ignore=shutil.ignore_patterns("checkpoint-*"))
    write_card(CardOptions(folder=tmp_path / "sft", base_model="owner/name"))
    card = (tmp_path / "sft" / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card and "base_model: owner/name" in card


def test_another_seed_starts_elsewhere_and_the_base_model_s_values_stay(run: Runner, trained: RunResult) -> None:
    unmoved = run("other", "--seed", "7", "--learning_rate", "0", "--max_steps", "1")
    pairs = [(run.weights("other")[name], weight) for name, weight in run.weights("sft").items() if "lora_A" in name]
    assert pairs and all((a - b).abs().mean() > 0.05 * b.abs().mean() for a, b in pairs)
    loss = unmoved.evaluation["eval_loss"]
    assert loss.adapter == pytest.approx(loss.base, abs=1e-6)
    assert loss.base == pytest.approx(trained.evaluation["eval_loss"].base, abs=1e-6)
    assert (unmoved.seed, unmoved.measured_steps, unmoved.seconds_per_step) == (7, (1,), None)


def test_a_resumed_run_ends_as_one_in_a_piece(run: Runner, trained: RunResult) -> None:
    """Bit for bit, so that the seed settles everything."""
    resumed = run("resumed", "--resume_from_checkpoint", str(run.folder / "sft" / "checkpoint-2"))
    assert (resumed.train.resumed_at, resumed.train.steps) == (2, 4)
    assert resumed.train.loss_curve == trained.train.loss_curve
    assert resumed.evaluation["eval_loss"] == trained.evaluation["eval_loss"]
    assert all(torch.equal(run.weights("resumed")[name], weight) for name, weight in run.weights("sft").items())


def test_true_resumes_from_the_last_checkpoint_and_wants_one(run: Runner, trained: RunResult) -> None:
    plan = recipe.parse_plan(run.config("sft", resume_from_checkpoint=True))
    assert recipe._checkpoint(plan.training) == str(run.folder / "sft" / "checkpoint-4")
    for value in (True, str(run.folder)):
        with pytest.raises(RecipeError, match="checkpoint"):
            run("nothing", resume_from_checkpoint=value)


@pytest.mark.parametrize(("method", "words"), [("sage", ["--token_budget", "0.5"]), ("lora", [])])
def test_dpo_starts_at_its_reference_and_moves(run: Runner, method: str, words: list[str]) -> None:
    result = run(f"dpo_{method}", *words, trainer="dpo", method=method, max_steps=2)
    assert result.exact is (method == "lora") and result.dataset.test_rows == 3
    assert result.evaluation["eval_loss"].base == pytest.approx(0.693147, abs=1e-4)
    assert abs(result.evaluation["eval_loss"].adapter - result.evaluation["eval_loss"].base) > 1e-5
    assert "eval_rewards/margins" in result.evaluation
    assert ("saliency" in result.settings) is (method == "sage")


def test_a_dry_run_says_config_and_batch_and_loads_no_weights(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "load_base", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    for trainer, shape in (("sft", "input_ids (2, "), ("dpo", "input_ids (4, ")):
        run.said.clear()
        assert run("dry", trainer=trainer, dry_run=True) is None
        config, batch = run.said[-2:]
        assert yaml.safe_load(config)["trainer"] == trainer and yaml.safe_load(config)["learning_rate"] == 0.01
        assert shape in batch and "Reply with an order ticket." in batch
    assert not (run.folder / "dry").exists()


@pytest.mark.parametrize(
    ("fields", "error", "part"),
    [
        ({"dataset_name": "gone.jsonl"}, RecipeError, "no file"),
        ({"model_name_or_path": "./gone"}, ModelUnavailableError, "gone"),
        ({"max_length": 32}, RecipeError, "longer than 32"),
        ({"max_length": 4096}, RecipeError, "that the model reads"),
        ({"dataset_name": "TEXTS", "metrics": ["exact_match"], "eval_strategy": "no"}, RecipeError, "without rows"),
        ({"dataset_name": "TEXTS", "eval_strategy": "steps"}, RecipeError, "without a test split"),
        ({"dataset_name": "TEXTS", "dataset_test_name": "TEXTS", "metrics": ["exact_match"]}, RecipeError, "a prompt"),
        ({"license": "free for all"}, CardError, "license"),
        ({"method": "sage", "token_budget": 1.5}, RecipeError, "token_budget"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_loads(
    run: Runner, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], error: type[Exception], part: str
) -> None:
    texts = run.folder / "texts.jsonl"
    texts.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    monkeypatch.setattr(recipe, "load_base", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    with pytest.raises(error, match=part):
        run("refused", **{name: str(texts) if value == "TEXTS" else value for name, value in fields.items()})


def test_answers_do_not_depend_on_their_batch(run: Runner, trained: RunResult) -> None:
    """Prompts are padded on the left, which a wrong mask or wrong positions would show."""
    from hf_memeff.recipes import answers

    source = find_smollm2(run.fields["model_name_or_path"])
    model, tokenizer = load_model(source), load_tokenizer(source)
    prompts = ["a", "a much longer prompt", "middle one"]
    together = answers._answers(model, tokenizer, prompts, 6)
    assert together == [answers._answers(model, tokenizer, [prompt], 6)[0] for prompt in prompts]
    assert any(together)


def test_no_picture_without_matplotlib(trained: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_curve, "can_plot", lambda: False)
    assert not learning_curve.plot_learning_curve(trained, tmp_path / CURVE_NAME)
    assert not (tmp_path / CURVE_NAME).exists()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 9}', '{"format": 1, "trainer": "sft"}'])
def test_files_that_are_no_results_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RESULTS_NAME).write_text(content, encoding="utf-8")
    with pytest.raises(ResultsError, match="expected the results of `hf-memeff finetune`"):
        read_result(tmp_path)


def test_the_command(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(run.config("command", max_steps=3))
    assert cli.main(["finetune", config, "--max_steps", "2", "--dry-run"]) == 0
    assert "max_steps: 2\n" in capsys.readouterr().out
    assert cli.main(["finetune", "--dry-run", config, "--learning_rte", "1"]) == 2
    assert capsys.readouterr().err.startswith("hf-memeff: Got option --learning_rte")
    with pytest.raises(SystemExit) as caught:
        cli.main(["finetune", config, "--help"])
    assert caught.value.code == 0
    assert {"--learning_rate", "--activation_store", "--dataset_name"} <= set(capsys.readouterr().out.split())
    assert not (run.folder / "command").exists()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RecipeError, match=r"without no_such_package, expected torch, no_such_package.*hf_memeff\[trl\]"
    ):
        require_packages("trl", "torch", "no_such_package")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_steps_on_the_real_model(tmp_path: Path) -> None:
    """The shipped rows on SmolLM2-135M-Instruct, in its chat form; the default of everything that has one."""
    config = tmp_path / "run.yaml"
    fields = {"output_dir": str(tmp_path / "out"), "target_modules": "all-linear", "learning_rate": 5e-4}
    sizes = {"dataset_test_rows": 4, "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1}
    config.write_text(yaml.safe_dump({**fields, **sizes, "bf16": False, "metrics": ["exact_match"]}), encoding="utf-8")
    assert cli.main(["finetune", str(config)]) == 0
    result = read_result(tmp_path / "out")
    assert result.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and result.base_revision is not None
    assert result.evaluation["eval_loss"].adapter < 0.9 * result.evaluation["eval_loss"].base
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8"))
    assert saved["base_model_name_or_path"] == result.base_model and saved["peft_type"] == "LORA"
