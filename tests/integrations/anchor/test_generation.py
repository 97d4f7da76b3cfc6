"""Prefill in parts, caches and decoding: what is generated under "anchor" is what eager attention generates."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from hf_memeff.integrations.attention import NAME, anchor_report, set_anchor_config
from integrations.anchor._models import LOGITS, SUPERBLOCK, build, keep_all, logits, padded, tokens


def greedy(model: PreTrainedModel, kind: str, inputs: dict[str, Tensor], **settings: Any) -> tuple[Tensor, Tensor]:
    """Generated ids and the logits of each step."""
    model.set_attn_implementation(kind)
    set_anchor_config(model, keep_all())
    config = GenerationConfig(
        max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **settings
    )
    out = model.generate(**inputs, generation_config=config)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache_implementation": "static", "disable_compile": True},
        {"prefill_chunk_size": 64},
        {"num_beams": 3},
        {"use_cache": False},
    ],
    ids=["dynamic", "static", "chunked", "beams", "no_cache"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_generation_is_eagers(family: str, settings: dict[str, Any]) -> None:
    model = build(family)
    inputs = padded(2, 100, "left")
    expected, found = (greedy(model, kind, inputs, **settings) for kind in ("eager", NAME))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=LOGITS)
    if family == "llama":
        assert anchor_report(model).sparse_calls > 0


@pytest.mark.parametrize("length", [1, 5, 16, 40, 129])
def test_c53_a_left_padded_row_is_the_row_alone(length: int) -> None:
    model = build("llama")
    ids = tokens(2, 129)
    mask = torch.ones_like(ids)
    mask[0, : 129 - length] = 0
    expected = greedy(model, "eager", {"input_ids": ids[:1, 129 - length :]}, min_new_tokens=6)
    together = greedy(model, NAME, {"input_ids": ids, "attention_mask": mask}, min_new_tokens=6)
    torch.testing.assert_close(together[1][:, 0], expected[1][:, 0], rtol=0, atol=LOGITS)
    # sparse too: keys are counted from the first real token, so the same ones are kept
    config = keep_all(theta=1.0)
    alone = logits(model, NAME, config, input_ids=ids[:1, 129 - length :])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, NAME, config, input_ids=ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(found[:1, 129 - length :], alone, rtol=0, atol=LOGITS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
@pytest.mark.parametrize("splits", [(100, 20), (64, 56), (97, 23), (40, 40, 40), (50,) + (1,) * 5])
def test_c58_continued_prefill_is_the_whole(family: str, splits: tuple[int, ...]) -> None:
    model = build(family)
    ids = tokens(2, sum(splits))
    expected = logits(model, "eager", input_ids=ids)
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all())
    cache, parts = DynamicCache(config=model.config), []
    for part in ids.split(splits, 1):
        with torch.no_grad():
            parts.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=LOGITS)


def test_c58_a_sparse_chunk_keeps_to_the_superblocks_of_the_whole() -> None:
    model = build("llama")
    ids = tokens(1, 4 * SUPERBLOCK)
    config = keep_all(theta=1.0)
    expected = logits(model, NAME, config, input_ids=ids)
    cache, parts = DynamicCache(config=model.config), []
    for part in ids.split(2 * SUPERBLOCK, 1):
        with torch.no_grad():
            parts.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=LOGITS)


def test_c58_assisted_decoding_gives_the_tokens_of_plain_decoding() -> None:
    model, assistant = build("llama"), build("llama", num_hidden_layers=1)
    inputs = {"input_ids": tokens(1, 100)}
    expected = greedy(model, "eager", inputs)[0]
    model.set_attn_implementation(NAME)
    assistant.set_attn_implementation(NAME)
    found = model.generate(**inputs, assistant_model=assistant, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("prompt", [7, 40, 200])
def test_c59_unfilled_slots_of_a_static_cache_are_not_keys(prompt: int) -> None:
    model = build("llama")
    ids = tokens(2, prompt + 3)
    expected = logits(model, "eager", input_ids=ids)
    model.set_attn_implementation(NAME)
    set_anchor_config(model, keep_all())
    cache = StaticCache(config=model.config, max_cache_len=256)
    with torch.no_grad():
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.reset()
        for layer in cache.layers:  # whatever is in a slot before it is filled
            layer.keys.fill_(1e4)
            layer.values.fill_(1e4)
        parts = [model(input_ids=ids[:, :prompt], past_key_values=cache, use_cache=True).logits]
        parts += [
            model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(prompt, prompt + 3)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=LOGITS)
    assert anchor_report(model).sparse_calls == (2 if prompt > SUPERBLOCK else 0)


def test_c62_sinks_take_their_share_also_in_decoding() -> None:
    model = build("gpt_oss")
    inputs = padded(2, 100, "left")
    expected, found = (greedy(model, kind, inputs) for kind in ("eager", NAME))
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=LOGITS)
    assert anchor_report(model).sparse_calls > 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e4)
    assert (logits(model, NAME, **inputs) - logits(build("gpt_oss"), NAME, **inputs)).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(24))
def test_conversations_of_any_shape(seed: int) -> None:
    """Turns of odd lengths with padding on either side, so with gaps in the end, over both kinds of cache."""
    draw = random.Random(seed)
    model = build(draw.choice(["llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral", "gemma3"]))
    rows = draw.randint(1, 3)
    lengths = [draw.choice([1, 2, 7, 8, 9, 31, 33, 64, 65, 100]) for _ in range(draw.randint(1, 3))]
    config = keep_all(
        block_size=draw.choice([4, 8, 16]),
        step=draw.choice([1, 2, 4]),
        init_blocks=draw.randint(0, 2),
        dense_tail=draw.choice([0, 13]),
    )
    turns = [tokens(rows, length, seed=seed) for length in lengths]
    masks = [torch.ones_like(turn) for turn in turns]
    for mask in masks:
        for row in mask:
            missing = draw.randrange(len(row))
            row[draw.choice([slice(0, missing), slice(len(row) - missing, None), slice(0, 0)])] = 0
    found = {}
    for kind in ("eager", NAME):
        model.set_attn_implementation(kind)
        set_anchor_config(model, config)
        static = draw.random() < 0.3 and not hasattr(model.config, "layer_types")
        cache = StaticCache(config=model.config, max_cache_len=320) if static else DynamicCache(config=model.config)
        parts = []
        for number, turn in enumerate(turns):
            mask = torch.cat(masks[: number + 1], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -turn.shape[1] :]
            with torch.no_grad():
                out = model(
                    input_ids=turn, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
                )
            parts.append(out.logits)
        found[kind] = torch.cat(parts, 1) * torch.cat(masks, 1)[..., None]
    torch.testing.assert_close(found[NAME], found["eager"], rtol=0, atol=LOGITS)
