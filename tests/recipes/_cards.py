"""Adapters of a tiny model with the results of a run beside them, as `hf-memeff finetune` leaves them."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model

from helpers import fill_adapters, tiny_model
from hf_memeff import MespConfig, SageConfig
from hf_memeff.benchmarks.results import Environment
from hf_memeff.recipes.results import (
    RESULTS_NAME,
    DataRecord,
    LossPoint,
    MetricValues,
    RunResult,
    TrainRecord,
    write_result,
)
from hf_memeff.tuners.config import MemeffConfig

CONFIGS: dict[str, type[LoraConfig]] = {"lora": LoraConfig, "mesp": MespConfig, "sage": SageConfig}
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
EVALUATION = {
    "eval_loss": MetricValues(2.718281828459045, 1.234567890123),
    "exact_match": MetricValues(0.020833333333, 0.729166666667),
}


def run_of(method: str = "mesp", **changes: Any) -> RunResult:
    """A run with made-up figures, none of them round, so that each is found again."""
    config = CONFIGS[method](r=4)
    options = list(config.option_rules()) if isinstance(config, MemeffConfig) else []
    settings = {name: getattr(config, name) for name in options if name != "activation_store_dir"}
    values: dict[str, Any] = {
        "trainer": "sft",
        "base_model": BASE,
        "base_revision": COMMIT,
        "method": method,
        "exact": method != "sage",
        "settings": json.loads(json.dumps({"r": 4, "target_modules": "all-linear", **settings})),
        "training_arguments": {"learning_rate": 0.000213, "max_steps": 17},
        "dataset": DataRecord("openai/gsm8k", "main", "train", 319, "test", 47),
        "train": TrainRecord(17, 0.4267, (LossPoint(5, 2.3456789), LossPoint(17, 1.3579111)), 61.5, None),
        "evaluation": EVALUATION,
        "peak_bytes": 123_456_789,
        "measured_steps": (4, 8, 12, 16),
        "seconds_per_step": 1.2345678,
        "environment": Environment(
            cpu="Some CPU",
            cores=2,
            threads=1,
            gpu=None,
            system="Linux x86_64",
            versions={"python": "3.11.7", "peft": "0.21.2"},
            commit="0123456789ab",
            date="2026-11-30",
        ),
        "seed": 4242,
    }
    return RunResult(**{**values, **changes})


def save_run(folder: Path, run: RunResult, base: str | Path = BASE) -> Path:
    """Save a tiny adapter of the run's method and the run's results.

    Args:
        folder: where to.
        run: the results.
        base: what the base model was loaded from.
    """
    known = {field.name for field in dataclasses.fields(CONFIGS[run.method])}
    options = {name: value for name, value in run.settings.items() if name in known}
    folder.mkdir(parents=True)
    for name, content in _adapter_files(run.method, json.dumps(options), str(base)).items():
        (folder / name).write_bytes(content)
    write_result(run, folder / RESULTS_NAME)
    return folder


@functools.cache
def _adapter_files(method: str, options: str, base: str) -> dict[str, bytes]:
    """What PEFT saves, by name; the tests need the same few adapters again and again."""
    model = tiny_model()
    model.name_or_path = model.config.name_or_path = base
    adapted = get_peft_model(model, CONFIGS[method](**{"task_type": "CAUSAL_LM", **json.loads(options)}))
    fill_adapters(adapted)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder, save_embedding_layers=False)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
