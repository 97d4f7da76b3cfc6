"""Training under "anchor" is dense, also in blocks that are run without grad and again with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from helpers import fill_adapters, loss_and_gradients, token_batch, worst_relative_error
from hf_memeff import MespConfig, SageConfig, memeff_status
from hf_memeff.integrations.attention import NAME, anchor_report, set_anchor_config
from integration._training import texts, tokenizer
from integrations.anchor._models import build, keep_all

LENGTH = 80


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("config_cls,settings", [(MespConfig, {}), (SageConfig, {"token_budget": 1.0})])
def test_blocks_that_are_run_again_give_the_dense_gradients(
    config_cls: type[LoraConfig], settings: dict[str, Any], family: str, padding: str
) -> None:
    batch = token_batch(2, LENGTH, padding)
    found = {}
    for kind in ("eager", NAME):
        model = get_peft_model(build(family), config_cls(r=4, target_modules=["q_proj", "v_proj"], **settings))
        fill_adapters(model)
        model.set_attn_implementation(kind)
        set_anchor_config(model, keep_all(theta=-5.0))
        found[kind] = loss_and_gradients(model, batch)
        assert {block.path for block in memeff_status(model).blocks} != {"off"}
    assert found[NAME][0] == pytest.approx(found["eager"][0], abs=1e-5)
    assert worst_relative_error(found[NAME][1], found["eager"][1]) < 1e-4
    report = anchor_report(model)
    assert report.sparse_calls == 0 and report.dense_calls["training"] > 0
    # the same weights in evaluation are sparse where they can be
    with torch.no_grad():
        model.eval()(input_ids=batch["input_ids"])
    assert anchor_report(model).sparse_calls == {"llama": 2, "gemma2": 0, "gpt_oss": 1}[family]


def test_the_first_loss_of_dpo_is_the_dense_one(tmp_path: Path) -> None:
    """A fresh adapter is compared with the model without it: ln 2, if both passes take the same path."""
    trl = pytest.importorskip("trl")
    prompts, chosen, rejected = (texts(4, 50, 60, seed) for seed in (1, 2, 3))
    rows = [
        {"prompt": p, "chosen": " " + c, "rejected": " " + r} for p, c, r in zip(prompts, chosen, rejected, strict=True)
    ]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        bf16=False,
    )
    model = build("llama")
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all(theta=-5.0))
    trainer = trl.DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert first == pytest.approx(math.log(2), abs=1e-5)
