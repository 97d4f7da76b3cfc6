"""What cannot work is refused before any work, with what was got, what was expected and the fix."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_memeff.recipes.demo import options as options_module
from hf_memeff.recipes.demo.options import RECORD_NAME, DemoError, DemoOptions, check_options, write_json


@pytest.fixture
def good(tmp_path: Path) -> DemoOptions:
    return DemoOptions(output=tmp_path / "new" / "folder", json_file=tmp_path / "r.json", device="cpu")


def test_good_options_make_the_folder_and_leave_it_empty(good: DemoOptions, tmp_path: Path) -> None:
    assert check_options(good) == "cpu"
    assert os.listdir(good.output) == []
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "Got --steps 0, expected at least 1"),
        ({"steps": -3}, "Got --steps -3"),
        ({"minutes": 0.0}, "Got --minutes 0.0, expected more than 0"),
        ({"minutes": float("nan")}, "Got --minutes nan"),
        ({"method": "full"}, "expected one of lora, lora-checkpointing, mesp"),
        ({"device": "tpu"}, "expected one that PyTorch can use here"),
    ],
)
def test_values_out_of_range(good: DemoOptions, change: dict[str, object], message: str) -> None:
    with pytest.raises(DemoError, match=message) as caught:
        check_options(replace(good, **change))
    assert "Fix: " in str(caught.value)
    assert not good.output.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(good: DemoOptions) -> None:
    with pytest.raises(DemoError, match=r"Got --device cuda, expected .*cpu"):
        check_options(replace(good, device="cuda"))


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_without_a_device_the_best_is_taken(
    good: DemoOptions, monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert check_options(replace(good, device=None)) == expected


def test_an_output_that_is_a_file(good: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DemoError, match="expected places that can be written to"):
            check_options(replace(good, output=output))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_without_write_permission(good: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(DemoError, match="expected places that can be written to"):
        check_options(replace(good, output=tmp_path / "locked"))


def test_a_json_file_that_cannot_be_written(good: DemoOptions, tmp_path: Path) -> None:
    for json_file in (tmp_path, tmp_path / "missing" / "r.json"):
        with pytest.raises(DemoError, match="expected places that can be written to"):
            check_options(replace(good, json_file=json_file))


def test_somebody_elses_folder_is_left_alone(good: DemoOptions) -> None:
    good.output.mkdir(parents=True)
    (good.output / "adapter_model.safetensors").write_bytes(b"weeks of work")
    with pytest.raises(DemoError, match=r"holds 'adapter_model\.safetensors' and is not from an earlier demo"):
        check_options(good)
    write_json({}, good.output / RECORD_NAME)
    assert check_options(good) == "cpu"


def test_a_full_disk(good: DemoOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(DemoError, match="with 1 MiB free, expected 64"):
        check_options(good)


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json({"a": 1}, path)
    with pytest.raises(TypeError):
        write_json({"a": 2, "b": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["r.json"]
    write_json({"a": 3}, path)
    assert json.loads(path.read_text()) == {"a": 3}
