"""Two processes on the CPU: DDP (case C44) and FSDP2 give the gradients of one process and of LoRA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import worst_relative_error
from integration import _distributed_worker as worker

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory):
    """What each of the two processes found, by scenario and method."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, worker.__file__]
    running = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in running:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one_process():
    """LoRA on all rows in this process, by the number of forwards in a step."""
    return {forwards: worker.train(worker.build("lora"), None, forwards) for forwards in (1, 2)}


def gradients(found):
    assert "error" not in found, found["error"]
    return {name: gradient.double() for name, gradient in found["gradients"].items()}


@pytest.mark.parametrize(("scenario", "method"), worker.CASES)
def test_c44_two_processes_give_the_gradients_of_one(both_ranks, one_process, scenario, method):
    expected = one_process[2 if "two forwards" in scenario else 1]
    ranks = [found[scenario, method] for found in both_ranks]
    for found in ranks:
        assert worst_relative_error(gradients(found), gradients(expected)) <= 1e-5
    mean = [sum(losses) / 2 for losses in zip(*(found["losses"] for found in ranks), strict=True)]
    assert mean == pytest.approx(expected["losses"], abs=1e-5)
    assert expected["losses"][0] != expected["losses"][1]


def test_sharded_blocks_run_structured_unless_their_factors_are_units_of_their_own(both_ranks):
    assert both_ranks[0]["fsdp", "mesp"]["paths"] == both_ranks[0]["fsdp", "attach"]["paths"] == ["structured"] * 2
    assert both_ranks[0]["fsdp, factors apart", "mesp"]["paths"] == ["recompute"] * 2
