"""Config files: TRL's and PEFT's own keys, the command line over the file, and what is refused in one line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import yaml
from trl import DPOConfig, SFTConfig

from hf_memeff import MespConfig, SageConfig
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.parsing import RunPlan, adapter_settings, parse_plan, resolved, training_settings


@pytest.fixture
def parse(tmp_path: Path):
    """Parse keys, written to a file, and words."""

    def write_and_parse(*words: str, **keys: object) -> RunPlan:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), **keys}), encoding="utf-8")
        return parse_plan(path, words)

    return write_and_parse


def test_keys_reach_the_three_configs(parse) -> None:
    plan = parse(
        learning_rate="1e-3",
        max_steps=7,
        bf16=False,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        r=4,
        target_modules=["q_proj", "v_proj"],
        lora_dropout="5e-2",
        mlp_tile_tokens=64,
        dataset_columns={"prompt": "question", "completion": "answer"},
    )
    assert type(plan.training) is SFTConfig
    assert (plan.training.learning_rate, plan.training.max_steps, plan.training.bf16) == (1e-3, 7, False)
    assert plan.training.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert plan.training.use_cpu is not torch.accelerator.is_available()
    assert type(plan.adapter) is MespConfig
    assert plan.adapter.target_modules == {"q_proj", "v_proj"}
    assert (plan.adapter.r, plan.adapter.lora_dropout, plan.adapter.mlp_tile_tokens) == (4, 0.05, 64)
    assert plan.run.columns == {"prompt": "question", "completion": "answer"}


def test_the_command_line_wins_over_the_file(parse) -> None:
    words = [
        "--trainer",
        "dpo",
        "--method=sage",
        "--beta",
        "0.3",
        "--token-budget",
        "0.25",
        "--dense_layers",
        "[0, -1]",
    ]
    plan = parse(*words, "--metrics", "exact_match", "final_number", "--bf16", "false", trainer="sft", r=4)
    assert type(plan.training) is DPOConfig and plan.training.beta == 0.3 and plan.training.bf16 is False
    assert type(plan.adapter) is SageConfig
    assert (plan.adapter.token_budget, plan.adapter.dense_layers, plan.adapter.r) == (0.25, (0, -1), 4)
    assert plan.run.metrics == ["exact_match", "final_number"]


def test_an_empty_file_is_the_default_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("", encoding="utf-8")
    plan = parse_plan(tmp_path / "run.yaml", ["--output_dir", str(tmp_path)])
    assert plan.run.dataset_name is None and plan.run.model_name_or_path is None
    assert adapter_settings(plan.adapter)["activation_store"] == "memory"


def test_the_resolved_config_is_a_config_again(parse) -> None:
    plan = parse(max_steps=3, method="sage", token_budget=0.25, r=4, target_modules=["q_proj", "v_proj"], bf16=False)
    again = parse(**yaml.safe_load(yaml.safe_dump(resolved(plan))))
    assert again.run == plan.run
    assert again.adapter.to_dict() == plan.adapter.to_dict()
    assert training_settings(again.training) == training_settings(plan.training)


@pytest.mark.parametrize(
    ("keys", "words", "parts"),
    [
        ({"learning_rte": 1}, [], ["Got key 'learning_rte'", "'learning_rate'"]),
        ({"target_module": "all-linear"}, [], ["'target_modules'"]),
        ({"dataset_nam": "x"}, [], ["'dataset_name'"]),
        ({}, ["--max_step", "3"], ["Got option --max_step", "'max_steps'"]),
        ({}, ["--per-device-train-batchsize=3"], ["'per_device_train_batch_size'"]),
        ({"zzzz": 1}, [], ["--help lists all fields"]),
        ({"token_budget": 0.5}, [], ["a field of SageConfig", "method: sage"]),
        ({"beta": 0.5}, [], ["a field of DPOConfig", "trainer: dpo"]),
        ({"trainer": "dpo", "packing": True}, [], ["a field of SFTConfig", "trainer: sft"]),
        ({"peft_type": "LORA"}, [], ["Got key 'peft_type'"]),
        ({"max_steps": 4.5}, [], ["max_steps: 4.5", "expected int"]),
        ({"max_steps": True}, [], ["expected int"]),
        ({"learning_rate": [1]}, [], ["expected float"]),
        ({"bf16": 3}, [], ["expected true or false"]),
        ({"output_dir": ["a"]}, [], ["expected str"]),
        ({"metrics": {"a": 1}}, [], ["expected a list"]),
        ({"max_steps": "ten"}, [], ["max_steps", "'ten'"]),
        ({}, ["--max_steps", "ten"], ["max_steps", "'ten'"]),
        ({"metrics": ["rouge"]}, [], ["Got metrics: rouge", "final_number"]),
        ({"trainer": "ppo"}, [], ["Got trainer: ppo", "sft, dpo"]),
        ({"method": "full"}, [], ["Got method: full", "mesp, sage, lora"]),
        ({"long_rows": "cut"}, [], ["Got long_rows: cut"]),
        ({"dataset_test_rows": 0}, [], ["Got dataset_test_rows: 0"]),
        ({"dataset_columns": "question"}, [], ["Got dataset_columns: question"]),
        ({"r": 0}, [], ["r"]),
        ({"activation_store": "tape"}, [], ["activation_store='tape'", "'disk'"]),
        ({"lr_scheduler_type": "straight"}, [], ["straight"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(parse, keys: dict[str, object], words: list[str], parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(*words, **keys)
    message = str(caught.value)
    assert all(part in message for part in [*parts, "expected", "Fix:"]), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "part"), [("- a\n- b\n", "a list"), ("a: [1\n", "no YAML"), (None, "Got no config")]
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str | None, part: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(RecipeError, match=part):
        parse_plan(path)


@pytest.mark.parametrize("name", ["sft.yaml", "dpo.yaml"])
def test_the_examples_and_their_commands_parse(name: str) -> None:
    path = Path(__file__).parents[2] / "examples" / name
    commands = [line for line in path.read_text(encoding="utf-8").splitlines() if "hf-memeff finetune" in line]
    assert len(commands) == 3
    for command in commands:
        _, program, _, config, *words = shlex.split(command)
        assert (program, Path(config).name) == ("hf-memeff", name)
        plan = parse_plan(path, [word for word in words if word != "--dry-run"])
        assert plan.training.seed == 0 and plan.adapter.target_modules == "all-linear"
