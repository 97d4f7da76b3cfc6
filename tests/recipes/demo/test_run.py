"""The demo from start to end, on a tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from hf_memeff.cli import main
from hf_memeff.recipes.demo import run
from hf_memeff.recipes.demo.options import RECORD_NAME, DemoOptions
from hf_memeff.recipes.demo.reload import Reloaded, ReloadError, score_in_stock_peft
from hf_memeff.recipes.demo.run import encode
from hf_memeff.recipes.demo.stock_peft import TokenRow, answer_loss
from hf_memeff.recipes.instruction_data import SYSTEM_PROMPT, load_rows
from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer


def test_the_demo_trains_saves_reloads_and_compares(tiny_folder: Path, tmp_path: Path) -> None:
    output, lines = tmp_path / "out", []
    result = run.run_demo(
        DemoOptions(steps=3, model=str(tiny_folder), output=output, json_file=tmp_path / "r.json", device="cpu"),
        say=lines.append,
    )
    assert result.failures() == []
    assert (result.steps, len(result.notes), len(result.comparison)) == (3, 24, 3)
    assert result.after.loss == pytest.approx(result.trained_loss, rel=1e-5)
    assert sorted(os.listdir(output)) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        RECORD_NAME,
        "memeff_config.json",
    ]
    assert json.loads((output / "adapter_config.json").read_text())["peft_type"] == "LORA"
    record = json.loads((tmp_path / "r.json").read_text())
    assert record == json.loads((output / RECORD_NAME).read_text())
    assert record["finished"]
    assert record["comparison"][2]["method"] == "mesp"
    assert {"torch", "peft", "hf_memeff"} <= set(record["environment"]["versions"])

    tokenizer = load_tokenizer(find_smollm2(str(tiny_folder)))
    again = PeftModel.from_pretrained(load_model(find_smollm2(str(tiny_folder))), output).eval()
    loss, _ = answer_loss(again, encode(tokenizer, load_rows("held_out")[:24]), tokenizer.pad_token_id)
    assert loss == pytest.approx(result.after.loss, rel=1e-5)


def test_too_little_time_shortens_the_training_and_says_so(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Reloaded(0.1, torch.zeros(24, 257), [[1]] * 24, [])
    monkeypatch.setattr(run, "score_in_stock_peft", lambda *args, **kwargs: nothing)
    lines: list[str] = []
    result = run.run_demo(
        DemoOptions(steps=500, model=str(tiny_folder), output=tmp_path / "out", device="cpu", minutes=0.01),
        say=lines.append,
    )
    assert (result.steps_wanted, result.steps, result.comparison_tokens) == (500, 1, 128)
    assert any("shortened from 500 to 1 steps, to stay within 0.01 minutes" in line for line in lines)


def test_an_adapter_that_stock_peft_cannot_load_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    source = find_smollm2(str(tiny_folder))
    with pytest.raises(ReloadError, match=r"exit status 1 .*adapter_config\.json"):
        score_in_stock_peft(source, None, tmp_path, [TokenRow([1], [2])], pad_id=0, end_ids=[0], device="cpu")


def test_an_unknown_model_stops_the_command_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "no/such/model", "--output", str(tmp_path / "out")]) == 2
    assert "Got --model 'no/such/model'" in capsys.readouterr().err


def test_rows_are_encoded_with_the_chat_template_of_the_model(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(find_smollm2(str(tiny_folder)))
    row = load_rows("train")[0]
    (plain,) = encode(tokenizer, [row])
    assert tokenizer.decode(plain.prompt).endswith(f"{row.note}\n")
    assert tokenizer.decode(plain.answer) == row.ticket + tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    (chat,) = encode(tokenizer, [row])
    assert tokenizer.decode(chat.prompt).startswith("<system>")
    assert tokenizer.decode(chat.prompt).endswith(f"<user>{row.note}<answer>")


def test_a_template_that_refuses_system_messages_gets_one_user_message(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(find_smollm2(str(tiny_folder)))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    )
    row = load_rows("train")[0]
    (chat,) = encode(tokenizer, [row])
    assert tokenizer.decode(chat.prompt) == f"<user>{SYSTEM_PROMPT}\n{row.note}\n<answer>"
