"""A layer's arguments: none is lost on the way through ``save_for_backward``."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from hf_memeff.blocks.arguments import bind, filled_cache, pack, without_cache


def test_tensors_are_taken_out_and_put_back_in_place():
    a, b, c = (torch.randn(2) for _ in range(3))
    given = {"mask": None, "rotary": (a, b), "flags": {"x": [c, 3]}, "word": "causal", "again": a}
    packed, tensors = pack(given)
    assert len(tensors) == 4
    others = [t + 1 for t in tensors]
    back = packed.unpack(others)
    assert set(back) == set(given) and back["word"] == "causal" and back["mask"] is None
    assert torch.equal(back["rotary"][0], a + 1) and torch.equal(back["rotary"][1], b + 1)
    assert torch.equal(back["flags"]["x"][0], c + 1) and back["flags"]["x"][1] == 3
    assert torch.equal(back["again"], a + 1)


def test_nothing_packed_holds_a_tensor():
    packed, _ = pack({"rotary": (torch.ones(2), torch.ones(2)), "n": 3})
    assert not any(isinstance(leaf, torch.Tensor) for leaf in packed.leaves)


def test_positional_arguments_get_their_names():
    names = ("hidden_states", "attention_mask", "position_ids")
    assert bind(names, ("h", "m"), {"position_ids": "p", "x": 1}) == (
        "h",
        {"attention_mask": "m", "position_ids": "p", "x": 1},
    )
    assert bind(names, (), {"hidden_states": "h"}) == ("h", {})


def test_arguments_without_names_are_not_dropped():
    assert bind((), ("h",), {}) is None
    assert bind(("hidden_states",), ("h", "mask"), {}) is None


def filled():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    return cache


def test_a_cache_with_entries_is_told_from_an_empty_one():
    for name in ("cache", "past_key_values", "past_key_value", "layer_past"):
        assert filled_cache({name: filled()})
        assert not filled_cache({name: DynamicCache()})
        assert filled_cache({name: (torch.ones(1), torch.ones(1))})  # what older models pass
    assert not filled_cache({"cache": None, "attention_mask": torch.ones(1)})


def test_an_empty_cache_is_taken_out_and_nothing_else():
    mask = torch.ones(2)
    given = {"cache": DynamicCache(), "use_cache": True, "attention_mask": mask}
    assert without_cache(given) == {"cache": None, "use_cache": False, "attention_mask": mask}
    assert given["use_cache"] is True
    assert without_cache({"attention_mask": mask}) == {"attention_mask": mask}
