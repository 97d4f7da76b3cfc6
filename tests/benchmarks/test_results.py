"""The results file: typed, whole at any time, and honest about where it comes from."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_memeff.benchmarks import results as module
from hf_memeff.benchmarks.results import (
    Environment,
    FamilyResult,
    ResultsError,
    read_family_results,
    read_method_results,
    write_results,
)


def test_results_survive_the_file(result, tmp_path: Path) -> None:
    written = [result(), replace(result("lora"), peak_bytes=None, step_seconds=(), reference_seconds=())]
    path = tmp_path / "new" / "mesp.json"
    write_results(written, path)
    assert read_method_results(path) == written
    entries = json.loads(path.read_text())["results"]
    assert [entry["time_ratio"] for entry in entries] == [pytest.approx(0.9), None]
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["mesp.json"]


def test_family_results_survive_the_file(result, tmp_path: Path) -> None:
    family = FamilyResult("Llama", "LlamaDecoderLayer", "structured", "", 1e-15, 1e-7, result().environment)
    write_results([family], tmp_path / "families.json")
    assert read_family_results(tmp_path / "families.json") == [family]


def test_a_failed_write_leaves_the_old_file(result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mesp.json"
    write_results([result()], path)

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_results([], path)
    assert read_method_results(path) == [result()]
    assert os.listdir(tmp_path) == ["mesp.json"]


def test_an_absent_file_has_no_results(tmp_path: Path) -> None:
    assert read_method_results(tmp_path / "none.json") == []


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 0, "results": []}', '{"format": 1, "results": {}}', '{"format": 1, "results": [3]}']
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mesp.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"Got .*mesp\.json with .*expected a file of this program\. Fix: "):
        read_method_results(path)


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_other_fields_are_refused(change: str, result, tmp_path: Path) -> None:
    path = tmp_path / "mesp.json"
    write_results([result()], path)
    content = json.loads(path.read_text())
    if change == "missing":
        del content["results"][0]["peak_bytes"]
    else:
        content["results"][0]["invented"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match="no MethodResult"):
        read_method_results(path)


def test_the_ratio_is_the_median_of_paired_rounds(result) -> None:
    # the third round ran on a machine that had become five times slower, for both alike
    pairs = replace(result(), step_seconds=(1.0, 1.2, 5.0), reference_seconds=(2.0, 2.0, 10.0))
    assert pairs.time_ratio == pytest.approx(0.5)


def test_the_environment_names_what_computes() -> None:
    here = Environment.here()
    assert here.threads == torch.get_num_threads()
    assert here.cpu and here.cores >= 1
    assert here.gpu is None  # the CPU computes, whatever else the machine has
    assert here.versions["torch"] == torch.__version__
    assert set(here.versions) >= {"python", "hf_memeff", "transformers", "peft", "accelerate"}


def test_figures_of_another_machine_or_version_are_not_comparable(result) -> None:
    here = result().environment
    assert here.comparable(replace(here, commit="other", date="2027-01-01"))
    assert not here.comparable(replace(here, threads=2))
    assert not here.comparable(replace(here, versions=here.versions | {"torch": "2.14.0"}))
    assert not here.comparable(replace(here, gpu="Some GPU"))


def test_the_commit_is_git_s_own(tmp_path: Path) -> None:
    root = Path(module.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    commit = Environment.here().commit
    assert commit is not None and head.startswith(commit.removesuffix("+changes"))
