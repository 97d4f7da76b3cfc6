"""`attn_implementation="anchor"` through transformers: every case equal to the model's eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
)

from helpers import fill_adapters, run_python
from hf_memeff.integrations.attention import (
    NAME,
    anchor_attention_forward,
    anchor_report,
    register_anchor,
    set_anchor_config,
    unregister_anchor,
)
from integrations.anchor._models import (
    LOGITS,
    SUPERBLOCK,
    assert_equal_to_eager,
    build,
    keep_all,
    logits,
    padded,
    tokens,
)

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]
SPARSE = {"llama": 2, "qwen2": 2, "qwen3": 2, "mistral": 0, "gemma2": 0, "gpt_oss": 1, "deepseek_v3": 2}
"""Layers of each that are sparse: not those with a window, nor those with a softcap."""


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("length", [1, 5, SUPERBLOCK, SUPERBLOCK + 1, 3 * SUPERBLOCK + 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_padding(family: str, length: int, side: str) -> None:
    model = build(family)
    assert_equal_to_eager(model, **padded(2, length, side))
    assert anchor_report(model).sparse_calls == (SPARSE[family] if length > SUPERBLOCK else 0)


def test_c49_packed_samples_do_not_see_each_other() -> None:
    parts = [tokens(1, n, seed=n) for n in (7, 133, 20)]
    ids = torch.cat(parts, 1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    for family in ("llama", "gemma2", "gpt_oss", "mistral"):
        model = build(family)
        alone = torch.cat([logits(model, "eager", input_ids=part) for part in parts], 1)
        for use_cache in (False, True):  # with a cache, transformers' own masks know nothing of the borders
            found = logits(model, NAME, keep_all(), input_ids=ids, position_ids=positions, use_cache=use_cache)
            torch.testing.assert_close(found, alone, rtol=0, atol=LOGITS)
            assert anchor_report(model).sparse_calls == SPARSE[family]


def test_c49_borders_as_cumulative_lengths() -> None:
    parts = [tokens(1, n, seed=n) for n in (7, 133, 20)]
    model = build("llama")
    alone = torch.cat([logits(model, "eager", input_ids=part) for part in parts], 1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    lengths = torch.tensor([0, 7, 140, 160], dtype=torch.int32)
    borders = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 133, "max_length_k": 133}
    found = logits(model, NAME, keep_all(), input_ids=torch.cat(parts, 1), position_ids=positions, **borders)
    torch.testing.assert_close(found, alone, rtol=0, atol=LOGITS)


def test_c52_both_registries_hold_the_name_and_the_mask_is_needed() -> None:
    assert NAME in AttentionInterface() and NAME in AttentionMaskInterface()
    model = build("llama")
    set_anchor_config(model, keep_all())
    model.set_attn_implementation(NAME)
    seen = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[4])
        return anchor_attention_forward(*args, **kwargs)

    AttentionInterface.register(NAME, spy)
    try:
        model(**padded(2, 50, "left"))
    finally:
        register_anchor()
    assert all(mask is not None and mask.shape == (2, 50) for mask in seen)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_c52_a_token_changes_nothing_before_it(family: str) -> None:
    model = build(family)
    ids = tokens(1, 100)
    before = logits(model, NAME, keep_all(theta=1.0), input_ids=ids)
    ids[0, 70] = 3 if ids[0, 70] != 3 else 4
    after = logits(model, NAME, keep_all(theta=1.0), input_ids=ids)
    # pooled rows choose keys for their whole superblock: within it a token may change which old keys are kept
    torch.testing.assert_close(after[:, :64], before[:, :64], rtol=0, atol=0)
    assert not torch.equal(after[:, 70:], before[:, 70:])
    keep = keep_all()
    before = logits(model, NAME, keep, input_ids=ids)
    ids[0, 70] = 5 if ids[0, 70] != 5 else 6
    torch.testing.assert_close(logits(model, NAME, keep, input_ids=ids)[:, :70], before[:, :70], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_c60_windows_hold(family: str) -> None:
    assert_equal_to_eager(build(family), input_ids=tokens(2, 100))


def test_c60_nothing_outside_every_window_is_seen() -> None:
    model = build("mistral")
    ids = tokens(1, 100)
    before = logits(model, NAME, keep_all(), input_ids=ids)
    ids[0, :10] = 9
    after = logits(model, NAME, keep_all(), input_ids=ids)
    # two layers with a window of 16 tokens each, the token itself included
    assert torch.equal(after[:, -1], before[:, -1])
    assert not torch.equal(after[:, 30], before[:, 30])
    assert anchor_report(model).dense_calls == {"sliding window": 2}


def test_c63_values_of_another_size_end_to_end() -> None:
    model = build("deepseek_v3")
    assert_equal_to_eager(model, **padded(2, 100, "left"))
    assert anchor_report(model).sparse_calls == 2


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_c64_groups_of_heads(groups: int) -> None:
    assert_equal_to_eager(build("llama", num_key_value_heads=groups), input_ids=tokens(2, 100))


@pytest.mark.parametrize("rows", [(5, 5), (40, 40), (1, 40), (20, 40)])
def test_c64_the_group_size_is_the_tensors_not_the_modules(rows: tuple[int, int]) -> None:
    module = torch.nn.Module().eval()
    module.is_causal, module.num_key_value_groups = True, 1
    q, k = torch.randn(1, 4, rows[0], 8), torch.randn(1, 2, rows[1], 8)
    out, _ = anchor_attention_forward(module, q, k, k, None)
    seen = torch.ones(rows, dtype=torch.bool).tril(rows[1] - rows[0])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-5)


ENCODERS = {
    "bert": transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    ),
    "t5": transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_c65_encoders_and_cross_attention_are_dense_and_not_causal(kind: str, side: str) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(ENCODERS[kind], dtype=torch.float32).eval()
    inputs = padded(2, 60, side)
    inputs["input_ids"] = inputs["input_ids"] % 60 + 3
    if kind == "t5":
        inputs["decoder_input_ids"] = tokens(2, 45) % 60 + 3
    found = {}
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        set_anchor_config(model, keep_all())
        with torch.no_grad():
            found[name] = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None] if kind == "bert" else 1
    torch.testing.assert_close(found[NAME] * real, found["eager"] * real, rtol=0, atol=1e-5)
    report = anchor_report(model)
    assert report.sparse_calls == 0 and report.dense_calls["not causal"] >= 2


def test_c65_a_module_that_does_not_say_is_not_causal_and_a_call_may_overrule() -> None:
    module = torch.nn.Module().eval()
    q = torch.randn(1, 2, 20, 8)
    expected = {c: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=c) for c in (False, True)}
    for flag, argument, causal in ((None, None, False), (True, None, True), (True, False, False), (False, True, True)):
        if flag is not None:
            module.is_causal = flag
        out, _ = anchor_attention_forward(module, q, q, q, None, is_causal=argument)
        torch.testing.assert_close(out.transpose(1, 2), expected[causal], rtol=0, atol=1e-5)
    longer = torch.randn(1, 2, 7, 8)  # keys that cannot be the rows' own
    out, _ = anchor_attention_forward(module, q, longer, longer, None)
    whole = torch.nn.functional.scaled_dot_product_attention(q, longer, longer)
    torch.testing.assert_close(out.transpose(1, 2), whole, rtol=0, atol=1e-5)


def test_c65_a_decoder_told_to_be_bidirectional() -> None:
    model = build("llama", is_causal=False)
    assert_equal_to_eager(model, **padded(2, 50, "left"))
    assert not torch.equal(
        logits(model, NAME, input_ids=tokens(1, 50)), logits(build("llama"), NAME, input_ids=tokens(1, 50))
    )


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_c67_training_is_dense_and_its_gradients_are_eagers(checkpointing: dict[str, bool] | None) -> None:
    ids, found = tokens(2, 80), {}
    for name in ("eager", NAME):
        model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"]))
        fill_adapters(model)
        model.set_attn_implementation(name)
        if checkpointing is not None:
            model.gradient_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        set_anchor_config(model, keep_all(theta=0.5))
        model.train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found[name] = loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found[NAME][0] == pytest.approx(found["eager"][0], abs=1e-5)
    assert len(found[NAME][1]) == 12
    for name, grad in found["eager"][1].items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(found[NAME][1][name], grad, rtol=0, atol=1e-5)
    report = anchor_report(model)
    assert report.sparse_calls == 0 and set(report.dense_calls) == {"training"}


def test_c67_evaluation_with_grad_is_dense_and_without_it_sparse() -> None:
    model = build("llama")
    ids = tokens(1, 80)
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all(theta=0.5))
    model(input_ids=ids).logits.sum().backward()
    assert anchor_report(model).dense_calls == {"gradient": 2}
    logits(model, NAME, input_ids=ids)
    assert anchor_report(model).sparse_calls == 2


def test_c67_attention_dropout_drops_in_training() -> None:
    model = build("llama", attention_dropout=0.5).train()
    model.set_attn_implementation(NAME)
    ids = padded(2, 40, "left")
    with torch.no_grad():
        assert not torch.equal(model(**ids).logits, model(**ids).logits)


def test_c68_attention_weights_are_refused_and_eager_is_named() -> None:
    model = build("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True
    with pytest.raises(ValueError, match="eager"):
        model(input_ids=tokens(1, 5), output_attentions=True)
    module = torch.nn.Module()
    q = torch.randn(1, 2, 5, 8)
    assert anchor_attention_forward(module, q, q, q, None)[1] is None


def test_c69_the_report_tells_sparse_from_dense() -> None:
    model = build("llama")
    config = keep_all(theta=0.5, min_length=64)
    logits(model, NAME, config, input_ids=tokens(1, 8))
    report = anchor_report(model)
    assert (report.sparse_calls, report.dense_calls, report.density) == (0, {"short": 2}, 1.0)
    logits(model, NAME, input_ids=tokens(1, 200))
    report = anchor_report(model)
    assert (report.sparse_calls, report.dense_calls) == (2, {"short": 2})
    assert 0 < report.density < 1
    assert [layer.layer for layer in report.layers] == [0, 1]
    assert "2 sparse calls" in str(report) and "2 x short" in str(report)


def test_c70_no_mask_grows_with_the_square_of_the_length() -> None:
    mask = AttentionMaskInterface()[NAME]
    length = 65_536
    arguments = {
        "batch_size": 2,
        "q_length": length,
        "kv_length": length,
        "mask_function": transformers.masking_utils.causal_mask_function,
        "config": build("llama").config,
    }
    assert mask(**arguments) is None
    padding = torch.ones(2, length, dtype=torch.bool)
    padding[0, :100] = False
    assert mask(**arguments, attention_mask=padding).shape == (2, length)
    assert mask(**{**arguments, "q_length": 1024, "q_offset": length - 1024}).shape == (2, length)


def test_c71_settings_load_without_arguments_and_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from hf_memeff.integrations.attention import AnchorAttentionConfig, register_anchor\n"
        "from transformers import AttentionInterface\n"
        "register_anchor(); AnchorAttentionConfig()\n"
        "assert 'anchor' in AttentionInterface() and 'transformers.trainer' not in sys.modules\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_c74_an_exported_program_is_dense_at_every_length() -> None:
    model = build("llama")
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all(theta=0.5))
    length = torch.export.Dim("length", min=4, max=256)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    program = torch.export.export(Logits(), (tokens(1, 40),), dynamic_shapes=({1: length},), strict=False)
    for n in (8, 40, 130):
        found = program.module()(tokens(1, n))
        torch.testing.assert_close(found, logits(model, "eager", input_ids=tokens(1, n)), rtol=0, atol=LOGITS)


def test_c76_a_saved_model_loads_without_this_package(tmp_path: Any) -> None:
    model = build("llama")
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all())
    logits(model, NAME, input_ids=tokens(1, 80))
    model.save_pretrained(tmp_path)
    assert "anchor" not in (tmp_path / "config.json").read_text()
    code = (
        "from transformers import AutoModelForCausalLM\n"
        f"print(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).config._attn_implementation)\n"
    )
    done = run_python(code, hide_package=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sdpa"


def test_the_name_can_be_taken_out_again() -> None:
    try:
        unregister_anchor()
        assert NAME not in AttentionInterface() and NAME not in AttentionMaskInterface()
        with pytest.raises(ValueError, match="not supported"):
            build("llama").set_attn_implementation(NAME)
    finally:
        register_anchor()
    register_anchor()
    build("llama").set_attn_implementation(NAME)


@pytest.mark.parametrize("name", ["sinks", "indices", "block_indices", "block_table"])
def test_arguments_that_nothing_reads_are_refused(name: str) -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=rf"{name}.*eager"):
        anchor_attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1)})
