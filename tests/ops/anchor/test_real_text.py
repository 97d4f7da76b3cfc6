"""Backends on the queries, keys and values of a real model on real text, whose scores are far from random ones."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer
from ops.anchor._inputs import kept_sets, run

pytestmark = pytest.mark.slow

TOKENS, LAYERS = 900, (0, 12, 29)
CAPTURE = "capture_for_a_test"


@pytest.fixture(scope="module")
def layers() -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """q (1, 9, N, 64), k and v (1, 3, N, 64) of some of SmolLM2's layers."""
    source = find_smollm2()
    topics = pydoc_data.topics.topics
    text = "".join(topics[name] for name in sorted(topics)[:6])
    ids = load_tokenizer(source)(text, return_tensors="pt").input_ids[:, :TOKENS]
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def capture(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in LAYERS:
            found[module.layer_idx] = q, k, v
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)

    AttentionInterface.register(CAPTURE, capture)
    model = load_model(source).eval()
    model.set_attn_implementation(CAPTURE)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    AttentionInterface._global_mapping.pop(CAPTURE)
    return found


@pytest.mark.parametrize("max_keep", [None, 40])
@pytest.mark.parametrize("theta", [4.0, 8.0, 12.0])
@pytest.mark.parametrize("layer", LAYERS)
def test_kept_sets_are_the_reference_s_and_the_output_a_softmax_over_them(
    layers: dict[int, tuple[Tensor, Tensor, Tensor]], layer: int, theta: float, max_keep: int | None
) -> None:
    q, k, v = layers[layer]
    settings: dict[str, Any] = {"block_size": 16, "step": 8, "min_length": 1, "dense_above": None}
    config = AnchorAttentionConfig(theta=theta, max_keep=max_keep, **settings)
    found, expected = run("torch", q, k, v, config), run("reference", q, k, v, config)
    sets, own = kept_sets(expected), kept_sets(found)
    assert own.keys() == sets.keys() and expected.kept > 0
    if sets != own:  # keys within 1e-4 of the threshold may fall on either side
        lower, upper = (
            kept_sets(run("reference", q, k, v, AnchorAttentionConfig(theta=theta + e, **settings)))
            for e in (-1e-4, 1e-4)
        )
        for name, keys in own.items():
            assert max_keep is not None or set(lower[name]) <= set(keys) <= set(upper[name]), name
            assert len(set(keys) ^ set(sets[name])) <= 2, name
    position = torch.arange(TOKENS)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
        for row in range(TOKENS):
            base = row // 128 * 128
            seen[row] = (position < 16) | (position >= max(16, base - 16))
            seen[row, own.get((0, head, base), [])] = True
        scores = (q[0, head] @ k[0, head // group].T / 8).masked_fill(
            ~(seen & (position <= position[:, None])), -torch.inf
        )
        torch.testing.assert_close(found.out[0, head], scores.softmax(-1) @ v[0, head // group], rtol=1e-5, atol=1e-5)
