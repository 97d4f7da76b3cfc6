"""The run of PEFT's own tests: what is replaced, what is recorded, what counts."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile

import pytest
from peft import AdaLoraConfig, LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_memeff import MespConfig
from hf_memeff.benchmarks.peft_suite import SuiteResult, suite_sentence
from hf_memeff.benchmarks.results import read_results
from peft_suite import __main__ as command
from peft_suite import outcomes, stand_ins
from peft_suite.outcomes import Comparison, Outcome, add_outcome, compare, read_outcomes
from peft_suite.plugin import set_default
from peft_suite.report import details, table
from peft_suite.source import copy_tests, files_about_lora, find_sdist, substitute

IMPORTS = """\
from peft import (
    AdaLoraConfig,
    LoraConfig,
    get_peft_model,
)
from peft import IA3Config


def later():
    from peft import LoraConfig, LoHaConfig  # of the function
    return LoraConfig, LoHaConfig
"""


def test_every_import_of_lora_config_gives_the_replacement():
    text = substitute(IMPORTS, "MespConfig")
    names: dict = {}
    exec(text, names)
    assert names["LoraConfig"] is MespConfig
    assert names["later"]()[0] is MespConfig
    assert names["AdaLoraConfig"] is AdaLoraConfig
    assert text.count("\n") == IMPORTS.count("\n"), "line numbers stay"
    assert text.count("hf_memeff") == 2


def test_the_names_of_lora_s_type_and_model_follow():
    text = substitute('x = {"ä": "LORA"}["ä"], "LoraModel", "LORA rank", LORA', "SageConfig")
    assert text == 'x = {"ä": \'SAGE\'}["ä"], \'SageModel\', "LORA rank", LORA'


def test_lora_s_own_run_is_of_the_tests_as_they_are():
    assert substitute(IMPORTS, None) == IMPORTS


def test_an_import_under_another_name_is_noticed():
    with pytest.raises(ValueError, match="line 1 imports LoraConfig under another name"):
        substitute("from peft import LoraConfig as Config", "MespConfig")


def sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"peft-0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_the_tests_are_copied_and_nothing_else(tmp_path):
    files = {
        "tests/test_a.py": "from peft import LoraConfig\n",
        "tests/test_b.py": "from peft import IA3Config\n",
        "tests/test_c.py": "from .testing_common import PeftCommonTester\n",
        "tests/../escape.py": "",
        "src/peft/test_d.py": "",
    }
    tests = copy_tests(sdist(tmp_path / "peft.tar.gz", files), tmp_path / "run", "MespConfig")
    assert {path.name for path in tests.iterdir()} == {"__init__.py", "test_a.py", "test_b.py", "test_c.py"}
    assert "import MespConfig as LoraConfig" in (tests / "test_a.py").read_text()
    assert files_about_lora(tests) == ["test_a.py", "test_c.py"]
    with pytest.raises(ValueError, match="without tests, expected PEFT's source distribution"):
        copy_tests(sdist(tmp_path / "other.tar.gz", {"setup.py": ""}), tmp_path / "run", None)


def test_a_cached_source_distribution_is_not_downloaded_again(tmp_path):
    (tmp_path / "peft-0.0.0.tar.gz").touch()
    assert find_sdist("0.0.0", tmp_path) == tmp_path / "peft-0.0.0.tar.gz"


def test_another_default_of_a_field_reaches_every_new_config():
    @dataclasses.dataclass(kw_only=True)
    class Config:
        budget: float = 0.5

    set_default(Config, "budget", 1.0)
    assert Config().budget == 1.0
    assert Config(budget=0.25).budget == 0.25
    assert dataclasses.replace(Config()).budget == 1.0
    assert Config.budget == dataclasses.fields(Config)[0].default == 1.0


def done(outcome="passed", used=True):
    return Outcome(outcome, used, 0.1, "why")


LORA = {
    "good": done(),
    "bad": done(),
    "skipped by us": done(),
    "gone": done(),
    "known": done(),
    "elsewhere": done(),
    "without a config": done(used=False),
    "skipped": done("skipped"),
    "failed": done("failed"),
}
OWN = {
    "good": done(),
    "bad": done("failed"),
    "skipped by us": done("skipped"),
    "known": done("failed"),
    "elsewhere": done(used=False),
    "skipped": done(),
}


def test_only_what_passes_for_both_and_uses_the_config_counts(monkeypatch):
    monkeypatch.setattr(outcomes, "reasons_of", lambda method: {"known": f"{method}'s reason", "good": "idle"})
    result = compare("mesp", LORA, OWN)
    assert (result.required, result.passed, result.unused) == (6, 1, ("elsewhere",))
    assert result.excepted == {"known": "mesp's reason"}
    assert set(result.failed) == {"bad", "skipped by us", "gone"}
    assert not result.holds
    lora, compared = {"test_a.py": LORA, "test_mixed.py": LORA}, {"mesp": {"test_a.py": result}}
    text = table(lora, compared) + details(lora, compared)
    assert "left out test_mixed.py, 6 tests that pass for LoRA: PeftMixedModel" in text
    assert "1 (1 excepted, 3 failed, 1 not reached)" in text
    assert "FAILED gone: missing: the test did not run" in text


@pytest.mark.parametrize(("excepted", "holds"), [(10, True), (11, False)])
def test_more_than_ten_excepted_tests_are_too_many(excepted, holds):
    one = Comparison("mesp", 1, 1, (), {}, {})
    many = Comparison("mesp", excepted, 0, (), {str(index): "reason" for index in range(excepted)}, {})
    assert Comparison.total("mesp", [one, many]).holds == holds


def test_a_record_that_was_cut_short_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "record.jsonl"
    assert read_outcomes(path) == {}
    add_outcome(path, "a", done())
    add_outcome(path, "b", done("failed"))
    path.write_text(path.read_text()[:-10])
    assert read_outcomes(path) == {"a": done()}


MINI = {
    "tests/testing_utils.py": "_HUB_MODEL_ACCESSES = {}\n",
    "tests/test_mini.py": """\
import pytest, torch
from peft import IA3Config, LoraConfig, get_peft_model
from . import testing_utils

CLASSES = pytest.mark.parametrize("config_cls", [LoraConfig, IA3Config])

def model(**fields):
    return get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"], **fields))

def test_good():
    assert "model" in testing_utils._HUB_MODEL_ACCESSES
    assert torch.rand(1) == torch.manual_seed(0) and 0 or torch.rand(1) >= 0
    model()

def test_stock_only():
    assert type(model().base_model).__module__.startswith("peft.")

@CLASSES
def test_classes(config_cls):
    config_cls(target_modules=["0"])

@pytest.mark.skip
def test_skipped():
    model()

def test_without():
    pass

def test_failing():
    assert model() is None
""",
}


@pytest.mark.slow
def test_a_small_suite_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "lay_out", lambda hub: None)
    path = sdist(tmp_path / "peft.tar.gz", MINI)
    arguments = ["--sdist", str(path), "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out.json")]
    assert command.main(arguments) == 1
    text = capsys.readouterr().out
    assert "mesp: passes 2 of 3 tests" in text and "sage: passes 2 of 3 tests" in text
    assert "FAILED tests/test_mini.py::test_stock_only: failed: AssertionError" in text
    results = read_results(SuiteResult, tmp_path / "out.json")
    assert [(r.method, r.required, r.passed, r.lora_failed, r.lora_skipped) for r in results] == [
        ("mesp", 3, 2, 1, 1),
        ("sage", 3, 2, 1, 1),
    ]
    assert "mesp: 2 of 3 pass, 0 excepted, 1 failed" in suite_sentence(results)

    records = list((tmp_path / "cache").rglob("test_mini.py.jsonl"))
    ids = {json.loads(line)["test"] for record in records for line in record.read_text().splitlines()}
    assert "tests/test_mini.py::test_classes[LoraConfig]" in ids
    assert not any("IA3" in name for name in ids)
    before = {record.parent.name: record.read_text().count("\n") for record in records}
    assert command.main([*arguments, "--resume", "--methods", "sage"]) == 1
    after = {record.parent.name: record.read_text().count("\n") for record in records}
    assert after == before | {"sage": before["sage"] + 1}, "only the failure runs again"
    assert command.main([*arguments, "--report"]) == 1
    assert "sage: passes 2 of 3 tests" in capsys.readouterr().out
    assert command.main([*arguments, "--methods", "mesp", "-k", "good"]) == 0


@pytest.mark.slow
def test_stand_ins_load_from_the_hub_s_cache_under_the_hub_s_names(tmp_path):
    base, adapter = "peft-internal-testing/tiny-random-OPTForCausalLM", "peft-internal-testing/tiny-OPTForCausalLM-lora"
    stand_ins.lay_out(tmp_path, [base, adapter])
    tokens = AutoTokenizer.from_pretrained(base, cache_dir=tmp_path)("hello", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(base, cache_dir=tmp_path)
    before = model(**tokens).logits
    model = PeftModel.from_pretrained(model, adapter, cache_dir=tmp_path)
    assert type(model.peft_config["default"]) is LoraConfig
    assert not before.equal(model(**tokens).logits)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_part_of_peft_s_own_tests(tmp_path, capsys):
    """Saving, loading, merging, disabling, several adapters and dtypes on the small MLP, with all settings but DoRA."""
    try:
        find_sdist(command.version("peft"), tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    part = "TestPeftCustomModel and Vanilla and LoRA and not DoRA"
    part += " and (save or load or merge or disable or multiple or dtype)"
    code = command.main(["--cache", str(tmp_path), "--files", "test_custom_models.py", "-k", part])
    text = capsys.readouterr().out
    assert code == 0, text
    assert int(text.split("passes ")[1].split()[0]) > 400, text
