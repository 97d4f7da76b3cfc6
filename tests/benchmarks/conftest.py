"""Made-up results for tables, plots and rendering; a tiny model and tiny data sets for what measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers import tiny_model
from hf_memeff.benchmarks.cases import Case
from hf_memeff.benchmarks.results import Environment, MethodResult
from hf_memeff.benchmarks.sage_methods import SageMethod
from hf_memeff.benchmarks.sage_results import CosineResult, LearningResult, StepResult

MIB = 2**20

ENVIRONMENT = Environment(
    cpu="Test CPU",
    cores=2,
    threads=1,
    gpu=None,
    system="Linux x86_64",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    commit="abc",
    date="2026-01-02",
)


def made_up(method: str = "mesp", tokens: int = 1024, peak_mib: float = 10.0, ratio: float = 0.9) -> MethodResult:
    """A result on SmolLM2 in fp32 at rank 8."""
    case = Case("SmolLM2-135M", "fp32", tokens, 8)
    return MethodResult(
        case=case.key,
        model=case.model,
        weights="real",
        dtype="fp32",
        tokens=tokens,
        rank=8,
        method=method,
        device="cpu",
        seed=0,
        loss_tile_bytes=MIB,
        gradient_error=3e-7,
        gradient_error_limit=1e-5,
        peak_bytes=int(peak_mib * MIB),
        meter="cpu profiler",
        resident_bytes=None,
        step_seconds=(2 * ratio, 4 * ratio, 9 * ratio),
        reference_seconds=(2.0, 4.0, 9.0),
        clock="wall time",
        environment=ENVIRONMENT,
    )


@pytest.fixture
def result() -> Callable[..., MethodResult]:
    """Makes a result; see `made_up`."""
    return made_up


@pytest.fixture
def sweep() -> list[MethodResult]:
    """Four methods at 512 and 1024 tokens, and one MeSP result at another rank."""
    peaks = {"lora": 200.0, "lora-checkpointing": 100.0, "lora-checkpointing-tiled": 50.0, "mesp": 10.0}
    results = [
        made_up(name, tokens, peak * tokens / 1024, ratio=1.0 if name == "lora-checkpointing" else 0.9)
        for tokens in (1024, 512)
        for name, peak in peaks.items()
    ]
    other = replace(made_up(peak_mib=11.0), rank=16, case="SmolLM2-135M/fp32/1024/r16")
    return [*results, other]


def learnt(method: str, seed: int, loss: float, budget: float | None = None, rate: float = 1e-3) -> LearningResult:
    """A training run on GSM8K."""
    trained = method != "base"
    return LearningResult(
        dataset="gsm8k",
        model="SmolLM2-135M",
        method=method,
        token_budget=budget,
        seed=seed,
        learning_rate=rate if trained else 0.0,
        rank=16,
        steps=100 if trained else 0,
        rows_per_step=4,
        longest_row=160,
        prompt="chat",
        test_rows=64,
        test_tokens=5000,
        test_loss=loss,
        train_losses=(2.0, 1.0) if trained else (),
        step_seconds=3.0 if trained else None,
        step_cpu_seconds=2.0 if trained else None,
        peak_bytes=100 * MIB if trained else None,
        meter="cpu profiler" if trained else "none",
        environment=ENVIRONMENT,
    )


def stepped(
    method: str, peak_mib: int, cached_mib: int | None, ratio: float, budget: float | None = None
) -> StepResult:
    """A step that takes so many times LoRA's CPU time, which is two thirds of checkpointing's."""
    return StepResult(
        dataset="gsm8k",
        model="SmolLM2-135M",
        method=method,
        token_budget=budget,
        rows=4,
        tokens=512,
        rank=16,
        peak_bytes=peak_mib * MIB,
        meter="cpu profiler",
        cached_bytes=cached_mib * MIB,
        step_seconds=(9.0, 9.0),
        step_cpu_seconds=(ratio, 2 * ratio),
        lora_seconds=(1.0, 3.0),
        lora_cpu_seconds=(1.0, 2.0),
        checkpointing_seconds=(3.0, 3.0),
        checkpointing_cpu_seconds=(1.5, 3.0),
        environment=ENVIRONMENT,
    )


def pointing(
    saliency: str, budget: float, cosines: tuple[float, ...], adapter: str = "random", **fields: Any
) -> CosineResult:
    """Cosines on GSM8K, the same for two blocks."""
    keys = SageMethod(f"sage-{saliency}", budget).backward_keys
    values: dict[str, Any] = {"dense_layers": (-1,), "backward_keys": keys} | fields
    return CosineResult(
        dataset="gsm8k",
        model="SmolLM2-135M",
        adapter=adapter,
        b_std=0.01 if adapter == "random" else None,
        saliency=saliency,
        token_budget=budget,
        rank=16,
        cosines=cosines,
        norm_ratios=(1.0,) * len(cosines),
        layer_cosines=(cosines[0], 1.0),
        environment=ENVIRONMENT,
        **values,
    )


@pytest.fixture
def learning() -> list[LearningResult]:
    """The base model, LoRA on three seeds, SAGE at 0.25 on some."""
    return [
        learnt("base", 0, 2.0),
        learnt("lora", 0, 1.5, rate=3e-4),
        *(learnt("lora", seed, 1.0 + seed / 10) for seed in (0, 1, 2)),
        *(learnt("sage-gradient", seed, 1.02 + seed / 10, 0.25) for seed in (0, 1, 2)),
        learnt("sage-attention", 0, 1.3, 0.25),
        learnt("sage-attention", 2, 1.4, 0.25),
        *(learnt("sage-random", seed, 1.6, 0.25) for seed in (0, 1, 2)),
    ]


@pytest.fixture
def steps() -> list[StepResult]:
    """LoRA, MeSP and SAGE by attention at 0.25."""
    return [
        stepped("lora", 1000, 900, 1.0),
        stepped("mesp", 100, 80, 1.4),
        stepped("sage-attention", 80, 40, 0.75, 0.25),
    ]


@pytest.fixture
def cosines() -> list[CosineResult]:
    """Attention at two budgets, gradient at one, after training too, and one variant."""
    return [
        pointing("attention", 0.25, (0.4, 0.5)),
        pointing("attention", 0.5, (0.8, 0.9)),
        pointing("gradient", 0.25, (0.84, 0.88)),
        pointing("gradient", 0.25, (0.7, 0.8), adapter="trained"),
        pointing("attention", 0.25, (0.3, 0.4), dense_layers=()),
    ]


def byte_tokenizer() -> Any:
    """One id per byte; 0 ends and pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<|end|>", *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")


def write_data(folder: Path, rows: int = 24) -> None:
    """GSM8K and BoolQ files whose rows differ in length and in content."""
    for split, offset in (("train", 0), ("test", 500)):
        numbers = [(offset + i, 3 * i) for i in range(rows)]
        gsm8k = [
            {"question": f"What is {a} + {b}?" + " Think." * (a % 3), "answer": f"#### {a + b}"} for a, b in numbers
        ]
        (folder / f"gsm8k_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gsm8k))
        boolq = [
            {"instruction": f"is {a} odd?", "input": "", "output": f"it is {bool(a % 2)}".lower()} for a, _ in numbers
        ]
        (folder / f"boolq_{split}.json").write_text(json.dumps(boolq))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both data sets."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """See `byte_tokenizer`."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def base() -> Any:
    """A two-layer Llama over bytes, never changed."""
    return tiny_model(vocab_size=257).eval()
