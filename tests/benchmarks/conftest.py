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
