"""What the operating system sees of a training step: growth of resident memory in a process of its own (Linux).

The meter of `measure_peak_memory` counts what PyTorch's allocator hands out, to the byte, but not the pages of a
memory-mapped activation store. Those of a store in RAM would show here as shared memory; those of a file on a disk are
the kernel's to drop, and do not count as anonymous or shared memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_memeff.benchmarks.cases import DTYPES, Case
from hf_memeff.benchmarks.methods import METHODS, make_trainee

_SAMPLE_SECONDS = 0.001


def resident_growth_bytes(folder: Path, case: Case, method: str) -> int | None:
    """Most anonymous plus shared resident memory of a fresh process in one step, above what it had before.

    Args:
        folder: the case's base model, as `save_pretrained` wrote it.
        case: what the step runs on.
        method: key of `METHODS`.

    Returns:
        Bytes; None where there is no /proc.

    Raises:
        RuntimeError: the process failed; the message has its last line.
    """
    if not Path("/proc/self/status").exists():
        return None
    request = json.dumps({"folder": str(folder), "case": asdict(case), "method": method})
    # A fixed threshold lets the C library give each freed tensor back at once, as the meter counts it.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(256 * 2**10)}
    command = [sys.executable, "-m", __name__, request]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode != 0:
        last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(
            f"Got exit status {finished.returncode} from measuring {case.key} {method} ({last}), expected 0. "
            "Fix: free some memory and run again; what is measured already stays."
        )
    return int(finished.stdout.split()[-1])


def peak_growth_bytes(fn: Callable[[], Any]) -> int:
    """Run a function and return the most that anonymous plus shared resident memory grew meanwhile, sampled each ms."""
    gc.collect()
    before = _resident_bytes()
    peak = before
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_SECONDS):
            peak = max(peak, _resident_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        fn()
    finally:
        done.set()
        sampler.join()
    return max(peak, _resident_bytes()) - before


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def main() -> None:
    """Measure the request in the first argument, a JSON object; print the bytes."""
    from transformers import AutoModelForCausalLM

    request = json.loads(sys.argv[1])
    case, method = Case(**request["case"]), METHODS[request["method"]]
    base = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=DTYPES[case.dtype])
    trainee = make_trainee(method, base, case)
    trainee.warm_up()
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    print(peak_growth_bytes(trainee.step))


if __name__ == "__main__":
    main()
