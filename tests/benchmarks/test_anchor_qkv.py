"""Queries, keys and values are those of the model; the texts to measure and to calibrate on never meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks.anchor_qkv import QkvStore, for_length, rope_factor
from hf_memeff.benchmarks.anchor_text import LongText, read_long_text
from hf_memeff.benchmarks.sage_text import DataError
from hf_memeff.integrations.attention import register_anchor

register_anchor()


def test_what_is_kept_is_what_the_layer_attends_with(base: Any, tmp_path: Path) -> None:
    ids = torch.randint(1, 257, (1, 400))
    store = QkvStore(tmp_path / "qkv", "400")
    assert store.missing([0, 1]) == [0, 1]
    told: list[int] = []
    store.fill(base, ids, [0, 1], lambda text, steps: told.append(steps))
    assert store.missing([0, 1]) == [] and sum(told) == 2
    assert base.config._attn_implementation == "sdpa"
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0])) for layer in base.model.layers
    ]
    with torch.no_grad():
        base(ids)
    for hook in hooks:
        hook.remove()
    for layer, expected in enumerate(seen):
        qkv = store.load(layer)
        assert qkv.k.shape[1] == 2 and qkv.q.shape == (1, 4, 400, 16)
        k, v = (x.repeat_interleave(2, 1) for x in (qkv.k, qkv.v))
        scores = (qkv.q @ k.transpose(2, 3) * qkv.scale).masked_fill(torch.ones(400, 400).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_only_missing_layers_are_run_and_no_layer_behind_them(base: Any, tmp_path: Path) -> None:
    store = QkvStore(tmp_path, "400")
    ids = torch.randint(1, 257, (1, 400))
    calls: list[int] = []
    hook = base.model.layers[1].register_forward_pre_hook(lambda module, arguments: calls.append(1))
    store.fill(base, ids, [0], lambda text, steps: None)
    store.fill(base, ids, [0], lambda text, steps: pytest.fail("layer 0 is there"))
    hook.remove()
    assert calls == []


def test_positions_are_stretched_only_beyond_those_trained_on(base: Any) -> None:
    assert rope_factor(base, 512) == 1 and rope_factor(base, 1024) == 2
    assert for_length(base, 512) is base
    longer = for_length(base, 1024)
    ids = torch.randint(1, 257, (1, 64))
    with torch.no_grad():
        assert not torch.allclose(longer(ids).logits, base(ids).logits, atol=1e-5)
    assert longer.model.layers[0].mlp.up_proj.weight is base.model.layers[0].mlp.up_proj.weight
    assert base.model.rotary_emb.rope_type == "default" and longer.model.rotary_emb.rope_type == "yarn"


def test_texts_are_disjoint_and_refused_where_too_short() -> None:
    text = LongText(torch.arange(100), calibration_tokens=30)
    assert text.calibration()[0].tolist() == list(range(70, 100))
    assert text.measured(35, 1)[0].tolist() == list(range(35, 70))
    with pytest.raises(DataError, match="Got a text of 100 tokens, expected 71 to measure on and 30 others"):
        text.measured(71)


def test_text_comes_from_a_folder_or_from_python(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Got no \*.txt file in"):
        read_long_text(tmp_path, tokenizer, 1)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    ids = read_long_text(tmp_path, tokenizer, 1).ids
    assert tokenizer.decode(ids) == "one\ntwo"
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot be read"):
        read_long_text(tmp_path, tokenizer, 1)
    assert len(read_long_text(None, tokenizer, 1).ids) > 100_000
