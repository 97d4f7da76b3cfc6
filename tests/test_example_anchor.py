"""The example of a question about a long document: on a tiny model, and in its small version on the real one."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers import tiny_model
from hf_memeff.recipes.model_source import ModelUnavailableError, find_smollm2

SCRIPT = Path(__file__).parents[1] / "examples" / "anchor_long_context.py"
LINE = re.compile(r"(sdpa|anchor): ([0-9.]+) s for ([0-9]+) tokens, answer (.*)")


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama over bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<|end|>", *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=len(alphabet) + 1, max_position_embeddings=8192).save_pretrained(folder)
    return folder


def test_both_ways_answer_about_a_document_of_the_users(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time. " * 400)
    words = ["--model", str(chat_model), "--document", str(tmp_path / "book.txt"), "--question", "Who?"]
    words += ["--tokens", "4500", "--calibration-tokens", "2400", "--answer-tokens", "3"]
    out = run(words, monkeypatch, capsys)
    found = LINE.findall(out)
    assert [name for name, *_ in found] == ["sdpa", "anchor"]
    assert {tokens for _, _, tokens, _ in found} == {str(4500 + len("\n\nWho?") + 1)}
    # random weights attend to every key alike, so that none can be left out and both answers are the same
    assert found[0][3] == found[1][3]
    assert "2 x kept share" in out.splitlines()[-1]


def test_a_prompt_too_short_to_be_sparse_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(["--tokens", "400"], monkeypatch, capsys)
    assert "got --tokens 400, expected 4500 or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_small_version_on_the_real_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_smollm2(allow_download=False)
    except ModelUnavailableError:
        pytest.skip("SmolLM2 is not on this machine")
    words = ["--tokens", "4500", "--calibration-tokens", "3072", "--answer-tokens", "12"]
    out = run(words, monkeypatch, capsys)
    (_, dense, _, expected), (_, sparse, _, answer) = LINE.findall(out)
    assert ("48213" in answer) == ("48213" in expected)
    assert float(dense) > 0 and float(sparse) > 0
    calls, density = re.search(r"anchor: ([0-9]+) sparse calls at density ([0-9.]+)", out).groups()
    assert int(calls) == 30 and 0 < float(density) < 0.6
