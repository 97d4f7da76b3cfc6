"""The mask function: plain causal is recognised by what a mask shows, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, LlamaForCausalLM, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_causal_mask_function,
)

from hf_memeff.integrations.anchor import masks
from hf_memeff.integrations.anchor.masks import anchor_mask, made_here
from hf_memeff.ops.anchor.layout import layout_mask

LENGTH = 40
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def ask(function: Callable[..., Tensor] = causal_mask_function, **changes: Any) -> Tensor | None:
    """The mask of two plain rows of 40 tokens, unless changed."""
    plain = {
        "batch_size": 2,
        "q_length": LENGTH,
        "kv_length": LENGTH,
        "mask_function": function,
        "dtype": torch.float32,
    }
    return anchor_mask(**{**plain, **changes})


def transformers_own(function: Callable[..., Tensor], **changes: Any) -> Tensor:
    """The whole mask that transformers makes."""
    plain = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "mask_function": function}
    return masking_utils.sdpa_mask(**{**plain, **changes, "allow_is_causal_skip": False})


def padding(side: str) -> Tensor:
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, slice(0, 9) if side == "left" else slice(-9, None)] = False
    return real


def test_plain_rows_need_no_mask() -> None:
    assert ask() is None
    assert ask(attention_mask=torch.ones(2, LENGTH, dtype=torch.bool)) is None
    wide = sliding_window_causal_mask_function(LENGTH)
    assert ask(wide, local_size=LENGTH) is None  # no window at this length


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_one_row_of_keys(side: str) -> None:
    assert torch.equal(ask(attention_mask=padding(side)), padding(side))


def test_earlier_keys_are_said_by_the_length() -> None:
    found = ask(q_length=10, q_offset=30)
    assert found.shape == (2, LENGTH) and found.all()
    # a static cache: a tensor for the offset, more keys than tokens, and a mask that ends with the last token
    found = ask(q_length=10, q_offset=torch.tensor(5), attention_mask=padding("left")[:, :15])
    assert torch.equal(found, padding("left")[:, :15])
    found = ask(q_length=10, q_offset=torch.tensor(0))
    assert found.shape == (2, 10) and found.all()


@pytest.mark.parametrize(
    "function",
    [
        sliding_window_causal_mask_function(16),
        chunked_causal_mask_function(16, torch.zeros(2, dtype=torch.long)),
        bidirectional_mask_function,
    ],
    ids=["window", "chunk", "bidirectional"],
)
def test_what_is_not_causal_to_the_first_key_is_transformers_own_mask(function: Callable[..., Tensor]) -> None:
    found = ask(function)
    assert torch.equal(found, transformers_own(function))
    assert made_here(found) and not made_here(found.clone())


def test_a_window_is_seen_behind_padding_too() -> None:
    window = sliding_window_causal_mask_function(32)
    real = padding("left")
    assert torch.equal(ask(window, attention_mask=real), transformers_own(window, attention_mask=real))


@pytest.mark.parametrize("ids", [[0] * 5, [0, -1, 0], [0, -1, -1, 1]], ids=str)
def test_groups_that_see_each_other_are_not_causal(ids: list[int]) -> None:
    groups = torch.full((2, LENGTH), -1)
    groups[:, 7 : 7 + len(ids)] = torch.tensor(ids)
    function = or_masks(causal_mask_function, blockwise_overlay(groups))
    assert torch.equal(ask(function, allow_is_causal_skip=False), transformers_own(function))


def test_a_users_function_is_never_guessed_at() -> None:
    def odd(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key != 5) | (row < 20)

    function = and_masks(causal_mask_function, odd)
    found = ask(function, use_vmap=True, allow_is_causal_skip=False)
    assert torch.equal(found, transformers_own(function))


def packed_function(borders: list[int], window: int | None = None) -> Callable[..., Tensor]:
    """What transformers makes of packed position ids."""
    positions = torch.cat([torch.arange(b - a) for a, b in zip([0, *borders], [*borders, LENGTH], strict=True)])[None]
    base = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    names = masking_utils.find_packed_sequence_indices(positions).expand(2, -1)
    remapped = remap_positions_for_packed_sequence(base, positions.expand(2, -1))
    return and_masks(remapped, packed_sequence_mask_function(names))


def test_packed_sequences_are_one_row_of_names() -> None:
    function = packed_function([7, 25])
    found = ask(function, allow_is_causal_skip=False)
    assert found.tolist() == [[1] * 7 + [2] * 18 + [3] * 15] * 2
    assert torch.equal(layout_mask(found, LENGTH), transformers_own(function))


def test_packed_sequences_with_a_window_that_matters_are_a_whole_mask() -> None:
    function = packed_function([7, 25], window=16)
    assert torch.equal(ask(function, allow_is_causal_skip=False), transformers_own(function))
    assert ask(packed_function([7, 25], window=18), allow_is_causal_skip=False).ndim == 2


def test_a_model_that_asks_for_a_whole_mask_gets_one() -> None:
    assert torch.equal(ask(allow_is_causal_skip=False)[0, 0], CAUSAL)


def test_one_query_gets_what_sdpa_gets() -> None:
    assert ask(q_length=1, q_offset=LENGTH - 1) is None
    real = padding("left")
    found = ask(q_length=1, q_offset=LENGTH - 1, attention_mask=real)
    assert torch.equal(found[:, 0, 0], real)


def test_a_bidirectional_decoder_gets_its_mask_and_an_encoder_need_not() -> None:
    class Config:
        is_causal = False

    arguments = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert ask(bidirectional_mask_function, **arguments) is None
    assert ask(bidirectional_mask_function, **arguments, config=Config()).all()


def test_a_row_without_a_real_token_is_no_reason_for_a_whole_mask() -> None:
    real = padding("left")
    real[1] = False
    assert torch.equal(ask(attention_mask=real), real)


@pytest.mark.parametrize("offset", [0, 7])
def test_positions_in_place_of_lengths_as_older_transformers_pass_them(offset: int) -> None:
    positions = torch.arange(offset, offset + 20)
    arguments = {"batch_size": 2, "kv_length": offset + 20, "mask_function": causal_mask_function}
    found = anchor_mask(**arguments, cache_position=positions)
    assert found is None if offset == 0 else found.shape == (2, 27) and bool(found.all())
    real = torch.ones(2, offset + 20, dtype=torch.bool)
    real[0, :3] = False
    assert torch.equal(anchor_mask(**arguments, cache_position=positions, attention_mask=real), real)


def test_a_family_with_attention_of_its_own_gets_eagers_mask_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    # from_config and from_pretrained take any registered name, also for models that never call its function
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    anchor = AutoModelForCausalLM.from_config(BloomConfig(**sizes), attn_implementation="anchor").eval()
    eager = AutoModelForCausalLM.from_config(BloomConfig(**sizes), attn_implementation="eager").eval()
    eager.load_state_dict(anchor.state_dict())
    ids, real = torch.randint(3, 64, (2, LENGTH)), padding("left").int()
    masks._calls_functions.cache_clear()
    for mask in (None, real):
        inputs = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            torch.testing.assert_close(anchor(**inputs).logits, eager(**inputs).logits, rtol=0, atol=0)
    assert [record.getMessage() for record in caplog.records].count(
        'BloomPreTrainedModel has attention of its own, which attn_implementation="anchor" cannot replace: it stays '
        "dense."
    ) == 1


def test_a_users_subclass_is_judged_by_its_family() -> None:
    source = type("Own", (LlamaForCausalLM,), {"__module__": "a_notebook"})  # a module without source
    assert source.config_class is LlamaConfig
    masks._calls_functions.cache_clear()
    assert ask(config=LlamaConfig()) is None
