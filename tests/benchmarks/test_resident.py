"""Resident memory of a step: anonymous pages count, pages of a file do not."""

from __future__ import annotations

import mmap
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_memeff.benchmarks import run as module
from hf_memeff.benchmarks.cases import MODELS, Case
from hf_memeff.benchmarks.journal import Journal
from hf_memeff.benchmarks.resident import peak_growth_bytes, resident_growth_bytes
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.run import Bench

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
MIB = 2**20


def test_the_peak_is_seen_though_it_is_gone_at_the_end() -> None:
    def work() -> None:
        torch.ones(64 * MIB // 4).sum()

    assert 60 * MIB < peak_growth_bytes(work) < 90 * MIB


def test_pages_of_a_file_on_disk_do_not_count(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.truncate(64 * MIB)
        with mmap.mmap(file.fileno(), 64 * MIB) as mapped:

            def work() -> None:
                for start in range(0, 64 * MIB, 4096):
                    mapped[start] = 1

            grown = peak_growth_bytes(work)
    if "tmpfs" in _file_system(tmp_path):
        assert grown > 60 * MIB
    else:
        assert grown < 16 * MIB


def _file_system(path: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((m for m in mounts if path.is_relative_to(m[1])), key=lambda m: len(m[1]))[2]


def test_a_fresh_process_measures_a_step(tmp_path: Path) -> None:
    case = Case("tiny", "fp32", 256, 2)
    MODELS["tiny"].build(torch.float32).save_pretrained(tmp_path)
    grown = resident_growth_bytes(tmp_path, case, "lora")
    assert grown is not None and MIB < grown < 100 * MIB


def test_a_failed_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"Got exit status 1 from measuring tiny/fp32/8/r2 lora .*expected 0\. Fix:"):
        resident_growth_bytes(tmp_path, Case("tiny", "fp32", 8, 2), "lora")


def test_only_the_cases_and_methods_that_ask_for_it_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resident_growth_bytes", lambda folder, case, method: 7)
    case = Case("tiny", "fp32", 8, 2, rounds=0)
    journal = Journal(tmp_path / "mesp.json", Environment.here())
    bench = Bench(journal, "cpu", lambda dtype: None)
    bench.run([case, replace(case, tokens=9, resident=True)], ("lora", "mesp-disk"))
    found = {(r.tokens, r.method): r.resident_bytes for r in journal.results.values()}
    assert found == {(8, "lora"): None, (8, "mesp-disk"): None, (9, "lora"): None, (9, "mesp-disk"): 7}
