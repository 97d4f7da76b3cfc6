"""README and examples: rendered figures, code that exists, examples that run offline."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hf_memeff
from helpers import fill_adapters, loss_and_gradients, tiny_model, token_batch, worst_relative_error
from hf_memeff import MespConfig, memeff_status
from hf_memeff.benchmarks.methods import METHODS
from hf_memeff.benchmarks.render import render_file
from hf_memeff.benchmarks.results import RESULTS_FOLDER, read_method_results
from hf_memeff.benchmarks.tables import length_sweep

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMITTED = read_method_results(RESULTS_FOLDER / "mesp.json")
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_is_what_the_results_say() -> None:
    assert not render_file(ROOT / "README.md", RESULTS_FOLDER, write=False), "Fix: hf-memeff bench --render"


def test_figures_are_rendered_and_never_typed() -> None:
    prose = re.sub(r"<!-- memeff:begin ([\w-]+) -->.*?<!-- memeff:end -->|```.*?```", "", README, flags=re.DOTALL)
    assert not re.findall(r"\d+(?:\.\d+)? ?(?:%|MB|MiB|GiB|GB|times|x\b|seconds)", prose)


def test_committed_results_have_every_method_where_it_matters_and_are_right() -> None:
    results = {(r.tokens, r.method): r for r in length_sweep(COMMITTED)}
    on_cpu = [name for name, method in METHODS.items() if not method.gpu_only]
    assert not [(n, m) for n in (256, 1024) for m in on_cpu if (n, m) not in results]
    assert {r.model for r in results.values()} == {"SmolLM2-135M"}
    assert all(r.gradient_error <= r.gradient_error_limit for r in COMMITTED)
    assert all(r.gradient_error_limit == 1e-5 for r in COMMITTED if r.dtype == "fp32")


def test_the_committed_peak_grows_no_faster_than_the_sequence() -> None:
    peaks = sorted((r.tokens, r.peak_bytes) for r in length_sweep(COMMITTED) if r.method == "mesp")
    assert len(peaks) >= 2
    for (short, small), (long, large) in pairwise(peaks):
        assert large / small <= long / short


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_code_names_what_the_package_has() -> None:
    for code in blocks("python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_memeff":
                assert {alias.name for alias in node.names} <= set(hf_memeff.__all__)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = get_peft_model(tiny_model(), MespConfig(**LORA))
    fill_adapters(model)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_the_one_change_gives_lora_s_gradients() -> None:
    (diff,) = blocks("diff")
    versions = ("\n".join(x[1:] for x in diff.splitlines() if x[:1] in (" ", sign)) for sign in "-+")
    gradients = []
    for code in versions:
        scope = {"LoraConfig": LoraConfig, "get_peft_model": get_peft_model, "model": tiny_model()}
        exec(code, scope)
        fill_adapters(scope["model"])
        gradients.append(loss_and_gradients(scope["model"], token_batch())[1])
    assert memeff_status(scope["model"]).attached
    assert worst_relative_error(gradients[1], gradients[0]) < 1e-5


def test_the_three_ways_on_from_a_saved_adapter(saved: Path) -> None:
    inference, training_on, second = (code for code in blocks("python") if "folder" in code)
    scope = {"base": tiny_model(), "folder": str(saved)}
    exec(inference, scope)
    assert type(scope["model"].peft_config["default"]) is LoraConfig
    assert not memeff_status(scope["model"]).attached  # loading without config= gives plain LoRA
    scope = {"base": tiny_model(), "folder": str(saved)}
    exec(training_on, scope)
    model = scope["model"]
    assert isinstance(model, PeftModel)
    assert {block.path for block in memeff_status(model).blocks} == {"structured"}
    assert any(p.requires_grad for p in model.parameters())
    exec(second, {"model": model, "folder": str(saved)})
    state = model.state_dict()
    pairs = [(name, name.replace(".default.", ".second.")) for name in state if ".lora_B.default." in name]
    assert pairs and all(torch.equal(state[a], state[b]) for a, b in pairs)


def test_status_attach_and_callback_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, attaching = (code for code in blocks("python") if "memeff_status" in code or "attach(" in code)
    exec(status, {"model": get_peft_model(tiny_model(), MespConfig(**LORA))})
    assert "structured" in capsys.readouterr().out
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    exec(attaching, {"model": model})
    assert not memeff_status(model).attached


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<|end|>", *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=len(alphabet) + 1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["mesp_sft", "mesp_trainer"])
def test_examples_run_and_save_a_plain_lora_adapter(
    name: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    script, output = ROOT / "examples" / f"{name}.py", tmp_path / "out"
    words = ["--model", str(chat_model), "--steps", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    trainer = runpy.run_path(str(script), run_name="__main__")["trainer"]
    assert trainer.state.global_step == 2
    adapter = PeftModel.from_pretrained(tiny_model(vocab_size=257), output)
    assert type(adapter.peft_config["default"]) is LoraConfig
    assert any(p.abs().max() > 0 for n, p in adapter.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize("method", ["mesp", "sage"])
def test_the_accelerate_loop_runs_and_saves_a_plain_lora_adapter(
    method: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, output = ROOT / "examples" / "accelerate_loop.py", tmp_path / "out"
    words = ["--model", str(chat_model), "--method", method, "--steps", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    scope = runpy.run_path(str(script), run_name="__main__")
    assert len(scope["losses"]) == 2
    assert scope["schedule"].get_last_lr() == [0.0]  # it ended with the run
    status = memeff_status(scope["model"])
    assert {block.path for block in status.blocks} == {"structured"}
    assert any("approximate gradients" in note for note in status.notes) == (method == "sage")
    adapter = PeftModel.from_pretrained(tiny_model(vocab_size=257), output)
    assert type(adapter.peft_config["default"]) is LoraConfig
    assert any(p.abs().max() > 0 for n, p in adapter.named_parameters() if "lora_B" in n)
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
