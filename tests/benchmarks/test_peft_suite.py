"""What is said of a run of PEFT's own tests."""

from __future__ import annotations

from dataclasses import replace

from hf_memeff.benchmarks.peft_suite import SuiteResult, suite_sentence
from hf_memeff.benchmarks.results import Environment, read_results, write_results
from hf_memeff.benchmarks.tables import NOT_MEASURED


def result(**fields):
    environment = replace(Environment.here(), versions={"peft": "1.2.3"})
    base = SuiteResult("mesp", ("test_a.py",), 10, 2, 3, 8, 1, ("test_b: a reason",), (), (), environment)
    return replace(base, **fields)


def test_the_sentence_has_the_counts_of_each_method():
    text = suite_sentence([result(), result(method="sage", passed=7, unused=0, failed=("test_c", "test_d"))])
    assert text == (
        "Of the tests in 1 files of peft 1.2.3 that pass for `LoraConfig` and use it: "
        "mesp: 8 of 10 pass, 1 excepted, 1 don't reach the method; sage: 7 of 10 pass, 1 excepted, 2 failed."
    )
    assert suite_sentence([]) == NOT_MEASURED


def test_results_come_back_from_their_file(tmp_path):
    write_results([result()], tmp_path / "peft_suite.json")
    assert read_results(SuiteResult, tmp_path / "peft_suite.json") == [result()]
