"""Run PEFT's own tests with LoraConfig replaced by this package's configs, and count what passes.

    python -m tests.peft_suite

The tests come from PEFT's source distribution, of the version that is installed; nothing of it is in this repository.
They run first for LoraConfig, then for each method: with `from hf_memeff import MespConfig as LoraConfig` behind every
import of LoraConfig, or SageConfig, whose token_budget is then 1 unless a test sets it. A method has to pass every test
that passes for LoraConfig and uses it; what is skipped for LoraConfig counts for nobody. Models on the Hub are replaced
by stand-ins with random weights, in every run the same; what needs more of the Hub fails for LoraConfig and is not
counted.

Single tests are excepted, and one file is left out, in tests/peft_suite/excepted.py; the output names them.

It needs what PEFT's tests import: pytest, pytest-timeout, parameterized, scipy, scikit-learn, diffusers. A file that
can't be imported is left out, for all. One core takes about an hour; a run that was stopped goes on with --resume.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from hf_memeff.blocks.store import user_cache_folder

from .excepted import LEFT_OUT
from .outcomes import Comparison, Outcome, compare, passed_tests, read_outcomes, required_tests
from .report import details, table, write_counts
from .source import REPLACED, copy_tests, files_about_lora, find_sdist
from .stand_ins import lay_out

CONFIGS = {"lora": REPLACED, "mesp": "MespConfig", "sage": "SageConfig"}
"""Method and the class that its run takes for LoraConfig."""


@dataclass(frozen=True)
class Runs:
    """Where the runs of the tests happen.

    Attributes:
        cache: folder of everything: `hub`, and per PEFT version `runs/METHOD/tests` and `outcomes/METHOD`.
        version: of PEFT.
        expression: pytest's -k, or an empty string.
    """

    cache: Path
    version: str
    expression: str

    def folder(self, method: str) -> Path:
        """What pytest of a method runs in."""
        return self.cache / self.version / "runs" / method

    def record(self, method: str, file: str) -> Path:
        """Record of a test file's outcomes; a choice of tests has one of its own."""
        folder = "outcomes" if not self.expression else "outcomes-of-some"
        return self.cache / self.version / folder / method / f"{file}.jsonl"

    def outcomes(self, method: str, file: str) -> dict[str, Outcome]:
        """What the tests of a file did."""
        return read_outcomes(self.record(method, file))

    def run(self, method: str, file: str) -> str:
        """Run the tests of a file that no earlier run is done with: all for LoRA, what LoRA passes for a method.

        A file that was run to its end for LoRA is done with; for a method, the tests that passed are.

        Returns:
            What went wrong with the run as a whole; empty if nothing did.
        """
        record = self.record(method, file)
        record.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "peft_suite.plugin", "-p", "no:cacheprovider", "-q"]
        command += ["-W", "ignore", "--tb=short", "--suite-config", CONFIGS[method], "--suite-record", str(record)]
        end = record.with_suffix(".end")
        if end.exists() if method == "lora" else file in LEFT_OUT:
            return ""
        if method != "lora":
            wanted = required_tests(self.outcomes("lora", file))
            if set(wanted) <= passed_tests(self.outcomes(method, file)):
                end.touch()
                return ""
            path = record.with_suffix(".wanted.json")
            path.write_text(json.dumps(wanted), encoding="utf-8")
            command += ["--suite-wanted", str(path)]
        if self.expression:
            command += ["-k", self.expression]
        log = record.with_suffix(".log")
        with log.open("w", encoding="utf-8") as output:
            code = subprocess.run(
                [*command, f"tests/{file}"],
                cwd=self.folder(method),
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if code not in (0, 1, 5):
            return f"{file} for {method}: pytest ended with {code}, see {log}"
        end.touch()
        return ""

    def finished_files(self, methods: Sequence[str]) -> list[str]:
        """Test files that earlier runs brought to their end, for every method that runs them."""
        ended = [
            {path.stem for path in self.record(method, "x").parent.glob("*.end")}
            | (set() if method == "lora" else set(LEFT_OUT))
            for method in methods
        ]
        return sorted(set.intersection(*ended))

    def forget(self, method: str, file: str) -> None:
        """Remove what an earlier run left."""
        for suffix in (".jsonl", ".end"):
            self.record(method, file).with_suffix(suffix).unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        ours = str(Path(__file__).parents[1])
        before = os.environ.get("PYTHONPATH")
        return os.environ | {
            "HF_DATASETS_OFFLINE": "1",
            "HF_HUB_CACHE": str(self.cache / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ours if not before else ours + os.pathsep + before,
            "TOKENIZERS_PARALLELISM": "false",
        }


def run_all(runs: Runs, methods: Sequence[str], files: Sequence[str], resume: bool, jobs: int) -> Iterator[str]:
    """Run test files for LoRA, then for the methods.

    Args:
        runs: where.
        methods: "lora", then others.
        files: names of test files.
        resume: whether to keep what an earlier run left.
        jobs: files to run at the same time.

    Yields:
        What went wrong with a file's run as a whole.
    """
    if not resume:
        for method in methods:
            for file in files:
                runs.forget(method, file)
    for method in methods:
        with ThreadPoolExecutor(jobs) as pool:
            yield from filter(None, pool.map(partial(runs.run, method), files))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare and print.

    Returns:
        0 if every method passes what it has to, 1 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.peft_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    methods = [method for method in CONFIGS if method != "lora"]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, help="methods to compare with LoRA")
    parser.add_argument("--sdist", type=Path, help="PEFT's source distribution; default: pip downloads it")
    parser.add_argument("--cache", type=Path, help="folder for downloads, copies, stand-ins and outcomes")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="test files, such as test_config.py; default: all")
    parser.add_argument("-k", dest="expression", default="", help="choose tests, as pytest's -k does")
    parser.add_argument("--resume", action="store_true", help="run only what an earlier run did not finish or pass")
    parser.add_argument("--report", action="store_true", help="run nothing, report what earlier runs finished")
    parser.add_argument("--jobs", type=int, default=1, help="test files to run at the same time (default: 1)")
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    options = parser.parse_args(arguments)

    cache = options.cache or user_cache_folder()
    if cache is None:
        parser.error("got no home directory for the cache, expected a folder. Fix: --cache DIR")
    cache = cache.resolve() if options.cache else cache / "peft_suite"
    runs = Runs(cache, version("peft"), options.expression)
    methods = ("lora", *options.methods)
    if options.report:
        files = options.files or runs.finished_files(methods)
    else:
        sdist = options.sdist or find_sdist(runs.version, cache)
        lay_out(cache / "hub")
        for method in methods:
            tests = copy_tests(sdist, runs.folder(method), None if method == "lora" else CONFIGS[method])
        files = options.files or files_about_lora(tests)
        for problem in run_all(runs, methods, files, options.resume, options.jobs):
            print(problem, file=sys.stderr)
    if not files:
        parser.error("got no test files, expected some. Fix: run without --report")
    lora = {file: runs.outcomes("lora", file) for file in files}
    compared: dict[str, dict[str, Comparison]] = {
        method: {
            file: compare(method, lora[file], runs.outcomes(method, file)) for file in files if file not in LEFT_OUT
        }
        for method in options.methods
    }
    print(table(lora, compared))
    print(details(lora, compared))
    if options.output is not None:
        write_counts(options.output, lora, compared)
    totals = [Comparison.total(method, by_file.values()) for method, by_file in compared.items()]
    return 0 if all(total.required and total.holds for total in totals) else 1


if __name__ == "__main__":
    sys.exit(main())
