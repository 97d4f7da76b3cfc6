"""Trainings that die in the middle: killed, and out of disk space while they save."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration import _crash_worker
from integration._crash_worker import METHODS, OPTIMIZER, WEIGHTS, train
from integration._training import losses, trained_weights


def own_file_system(folder):
    """How a command begins that has 1 MiB of its own in `folder` until it ends; None without the right to do so."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=1m tmpfs {folder} && exec "
    command = [unshare or "", *([] if os.getuid() == 0 else ["-r"]), "-m", "sh", "-c", mount + '"$@"', "sh"]
    return command if unshare and subprocess.run([*command, "true"], capture_output=True).returncode == 0 else None


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """The folder of the killed runs, and what the worker saw."""
    folder, disk = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("disk")
    isolated = own_file_system(disk)
    command = [*(isolated or []), sys.executable, _crash_worker.__file__, str(folder), str(disk) if isolated else "-"]
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="kills a forked process")
@pytest.mark.parametrize("method", METHODS)
def test_c42_a_killed_run_resumes_with_the_losses_and_weights_of_an_uninterrupted_one(tmp_path, crashed, method):
    folder, found = crashed
    assert found[method] == signal.SIGKILL
    assert [path.name for path in (folder / method).glob("checkpoint-*")] == ["checkpoint-2"]
    resumed, whole = train(method, folder / method, resume=True), train(method, tmp_path)
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 4
    weights = trained_weights(whole.model)
    for name, weight in trained_weights(resumed.model).items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("part", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("method", ["mesp", "sage"])
def test_c42_a_full_disk_leaves_the_earlier_checkpoint_and_is_named(tmp_path, crashed, method, part):
    report = crashed[1].get(f"{method}, {part}")
    if report is None:
        pytest.skip("no right to mount a tmpfs")
    # torch.save, which writes optimizer.pt, says in torch 2.13 only how far it got
    expected = "No space left on device|os error 28" if part == WEIGHTS else "unexpected pos|No space left"
    assert re.search(expected, report["error"]), report["error"]
    assert (OPTIMIZER in report["files"]) == (part == OPTIMIZER)
    assert "trainer_state.json" not in report["files"]  # written last: the folder can be told from a whole one
    assert "checkpoint-4" in report["error of the part"]  # resume_from_checkpoint=True takes the newest folder
    assert report["loaded"] == 14
    assert report["losses"] == losses(train(method, tmp_path))
