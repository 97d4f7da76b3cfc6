"""Which tokens a salient block keeps: padding, packing, attention implementations, adaptive budgets, real text."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blocks._models import LENGTH, adapted, engine, packed_batch, step
from blocks._tolerances import relative_error
from helpers import token_batch
from hf_memeff.blocks.attention_probe import UnscorableAttention, score_rule
from hf_memeff.blocks.batch_tokens import BatchTokens
from hf_memeff.blocks.options import SalientTokens
from hf_memeff.blocks.salient import SalientCall
from hf_memeff.ops.selection import budget_tokens

SALIENCIES = ("attention", "gradient", "value_norm", "random")


def sparse(budget=0.3, **settings):
    return SalientTokens(token_budget=budget, **{"dense_layers": (), **settings})


@pytest.fixture
def chosen(monkeypatch):
    """The tokens of every choice, in the order they are made."""
    kept = []
    own = SalientCall.choose

    def choose(self, scores, shape, device):
        kept.append(own(self, scores, shape, device))
        return kept[-1]

    monkeypatch.setattr(SalientCall, "choose", choose)
    return kept


def alive_positions(kept, row):
    positions = kept.positions[row]
    return (positions if kept.alive is None else positions[kept.alive[row]]).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("saliency", SALIENCIES)
def test_padding_is_never_kept(saliency, side, chosen):
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH, side)
    real = batch["attention_mask"].bool()
    with engine(model, strict=True, salient=sparse(0.9, saliency=saliency, sink_tokens=2)):
        step(model, batch)
        count = budget_tokens(0.9, LENGTH)
        calls = chosen[-len(model.get_base_model().model.layers) :]
    for kept in calls:
        assert kept.positions.shape == (2, count)
        for row in range(2):
            alive = alive_positions(kept, row)
            there = real[row].nonzero().flatten().tolist()
            assert alive == sorted(alive) and set(alive) <= set(there) and len(alive) == min(count, len(there))
            assert {*there[:2], there[-1]} <= set(alive)


@pytest.mark.parametrize("saliency", SALIENCIES)
def test_packed_sequences_keep_their_own_sinks_and_last_token(saliency, chosen):
    model, batch = adapted("llama", torch.float32), packed_batch()
    with engine(model, strict=True, salient=sparse(0.4, saliency=saliency, sink_tokens=1)):
        step(model, batch)
    for kept in chosen[-2:]:
        for row in range(2):
            second = int(batch["position_ids"][row, 1:].eq(0).nonzero()) + 1
            assert {0, second - 1, second, LENGTH - 1} <= set(alive_positions(kept, row))


def test_random_tokens_are_the_same_in_every_layer_and_other_ones_for_another_batch(chosen):
    model = adapted("llama", torch.float32)
    with engine(model, strict=True, salient=sparse(saliency="random")):
        torch.manual_seed(3)
        for seed in (1, 1, 2):
            ids = torch.randint(3, 100, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
            state = torch.get_rng_state()
            loss = model(input_ids=ids, labels=ids).loss
            assert torch.equal(state, torch.get_rng_state())
            loss.backward()
    first, second, again, _, other, _ = (kept.positions for kept in chosen[-6:])
    assert torch.equal(first, second) and torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_random_tokens_of_a_batch_are_other_ones_in_another_epoch(dropout, chosen):
    """A loader moves the generator on between epochs; dropout does within a call, in which every block draws alike."""
    model, batch = adapted("llama", torch.float32, lora_dropout=dropout), token_batch(2, LENGTH)
    with engine(model, strict=True, salient=sparse(saliency="random")):
        torch.manual_seed(3)
        state = torch.get_rng_state()
        for _ in range(2):
            model(**batch).loss.backward()
            torch.rand(1)
        torch.set_rng_state(state)
        model(**batch).loss.backward()
    first, second, other, _, again, _ = (kept.positions for kept in chosen[-6:])
    assert torch.equal(first, second) and torch.equal(first, again) and not torch.equal(first, other)


def test_which_rows_are_asked_changes_the_choice(chosen):
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    batch["labels"][:, : LENGTH - 6] = -100
    found = {}
    for rows in ("labels", "last", 2):
        with engine(model, strict=True, salient=sparse(query_rows=rows, sink_tokens=0)):
            step(model, batch)
        found[rows] = chosen[-2].positions
    assert len({tuple(positions.flatten().tolist()) for positions in found.values()}) == 3


def eager_choice(model, batch, count, sinks):
    """The tokens of every layer from whole attention matrices of the eager implementation."""
    attentions = eager_attentions(model, batch)
    asked = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1), value=False)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    sets = []
    for weights in attentions:
        scores = (weights * asked[:, None, :, None]).sum((1, 2))
        rows = []
        for row in range(len(scores)):
            there = real[row].nonzero().flatten().tolist()
            first = {*there[:sinks], there[-1]}
            ranked = sorted(there, key=lambda t, row=row, first=first, s=scores: (t not in first, -s[row, t].item(), t))
            rows.append(set(ranked[:count]))
        sets.append(rows)
    return sets


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_attention_keeps_the_top_of_whole_attention_matrices(side, implementation, chosen):
    model = adapted("llama", torch.float32, overrides={"attn_implementation": implementation})
    batch = token_batch(2, LENGTH, side)
    batch["labels"][:, : LENGTH // 2] = -100
    expected = eager_choice(model, batch, budget_tokens(0.4, LENGTH), 4)
    with engine(model, strict=True, salient=sparse(0.4)):
        step(model, batch)
    assert len(expected) == 2
    for kept, rows in zip(chosen[-2:], expected, strict=True):
        assert [set(alive_positions(kept, row)) for row in range(2)] == rows


def eager_attentions(model, batch):
    """The attention of every layer, (B, H, S, S), by the eager implementation."""
    base = model.get_base_model()
    implementation = base.config._attn_implementation
    base.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            inputs = {k: v for k, v in batch.items() if k != "labels"}
            return base(**inputs, output_attentions=True, use_cache=False).attentions
    finally:
        base.set_attn_implementation(implementation)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_gradients_count_by_themselves_and_through_the_attention_of_the_rows_with_the_most(side, monkeypatch):
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH, side)
    attention = eager_attentions(model, batch)[-1].mean(1)
    scores, incoming = [], []
    own = SalientCall.choose
    monkeypatch.setattr(SalientCall, "choose", lambda self, s, *rest: (scores.append(s), own(self, s, *rest))[1])
    norm = model.get_base_model().model.norm

    def note(module, args):
        args[0].register_hook(incoming.append)

    handle = norm.register_forward_pre_hook(note)
    with engine(model, strict=True, salient=sparse(0.3, saliency="gradient")):
        scores.clear()  # the self-check's
        step(model, batch)
    handle.remove()
    g = incoming[0].norm(dim=-1)
    expected = g.clone()
    for row in range(2):
        asked = g[row].topk(budget_tokens(0.3, LENGTH)).indices
        expected[row] += (g[row, asked, None] * attention[row, asked]).sum(0)
    assert relative_error(scores[0], expected) <= 1e-4


@pytest.mark.slow
def test_attention_keeps_the_top_of_whole_attention_matrices_on_real_text(chosen):
    """SmolLM2, an English text, every layer: the sets overlap by 99 % and more (ties aside)."""
    import pydoc_data.topics

    from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer

    source = find_smollm2()
    tokenizer = load_tokenizer(source)
    model = adapted(model=load_model(source))
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:3])
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :512].view(2, 256)
    labels = ids.clone()
    labels[:, :128] = -100
    batch = {"input_ids": ids, "labels": labels}
    count = budget_tokens(0.25, 256)
    expected = eager_choice(model, batch, count, 4)
    with engine(model, strict=True, salient=sparse(0.25)):
        step(model, batch)
    layers = len(model.get_base_model().model.layers)
    for kept, rows in zip(chosen[-layers:], expected, strict=True):
        for row in range(2):
            assert len(set(alive_positions(kept, row)) & rows[row]) >= 0.99 * count


def test_the_rows_of_a_flex_mask_are_read_from_its_function():
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    def visible(batch, head, row, column):
        return (column <= row) & ((column >= 3) | (batch == 0))

    attention = adapted("llama", torch.float32).get_base_model().model.layers[0].self_attn
    mask = create_block_mask(visible, 2, None, LENGTH, LENGTH, device="cpu")
    rule = score_rule(attention, "flex_attention", (LENGTH, 16), mask, BatchTokens(), {"scaling": 0.5})
    rows, keys = torch.tensor([[0, 5, 22], [3, 4, 9]]), torch.tensor([[0, 2, 7], [1, 3, 9]])
    dense = create_mask(visible, 2, 1, LENGTH, LENGTH, device="cpu")
    for row in range(2):
        expected = dense[row, 0][rows[row]]
        assert torch.equal(rule.bias(rows, torch.float32, range(LENGTH))[row, 0] == 0, expected)
        assert torch.equal(rule.bias(rows, torch.float32, keys)[row, 0] == 0, expected[:, keys[row]])


def test_masks_that_cannot_be_read_are_named():
    attention = adapted("llama", torch.float32).get_base_model().model.layers[0].self_attn
    with pytest.raises(UnscorableAttention, match=r"its attention mask is a Tensor \(2, 3, 4\)"):
        score_rule(attention, "sdpa", (4, 16), torch.zeros(2, 3, 4), BatchTokens(), {})
    with pytest.raises(UnscorableAttention, match="position bias"):
        score_rule(attention, "sdpa", (4, 16), None, BatchTokens(), {"position_bias": torch.zeros(1)})


@pytest.mark.parametrize("saliency", ["attention", "gradient"])
def test_a_mask_that_is_not_what_it_is_read_as_is_named(saliency):
    """An attention with a window of its own, wider than the self-check's input: gradients would be wrong unnoticed."""
    from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS

    def windowed(module, query, key, value, attention_mask, scaling, **kwargs):
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-8)
        key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    ALL_ATTENTION_FUNCTIONS["windowed"] = windowed
    try:
        model.get_base_model().config._attn_implementation = "windowed"
        with (
            engine(model, strict=True, salient=sparse(saliency=saliency)),
            pytest.raises(ValueError, match=r"what windowed attention gives differs by .* Fix: .*MespConfig") as error,
        ):
            step(model, batch)
        assert ('saliency="gradient", which needs' in str(error.value)) == (saliency == "attention")
    finally:
        del ALL_ATTENTION_FUNCTIONS["windowed"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_adaptive_budget_is_refused_where_blocks_are_checkpointed(use_reentrant):
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    batch["use_cache"] = False
    model.enable_input_require_grads()
    with engine(model, salient=sparse("adaptive", min_tokens=1)):
        layer = model.get_base_model().model.layers[0]
        own = layer.__dict__["forward"]
        layer.__dict__["forward"] = lambda *args, **kwargs: checkpoint(
            lambda *a: own(*a, **kwargs), *args, use_reentrant=use_reentrant
        )
        try:
            with pytest.raises(ValueError, match=r"adaptive.* under a checkpoint .* token_budget=0\.5"):
                step(model, batch)
        finally:
            layer.__dict__["forward"] = own


@pytest.mark.parametrize("tiled_loss", ["auto", "never"])
def test_an_adaptive_budget_is_refused_under_compile(tiled_loss):
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    with engine(model, tiled_loss=tiled_loss, salient=sparse("adaptive", min_tokens=1)):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match=r"adaptive.* under torch\.compile"):
            compiled(**batch)
    torch._dynamo.reset()


def test_an_adaptive_budget_keeps_the_mass(chosen):
    """|T| is a multiple of 64, at most the length; a larger share of the attention keeps more tokens."""
    model, batch = adapted("llama", torch.float32), token_batch(1, 200)
    counts = {}
    for mass in (0.3, 0.95):
        with engine(model, strict=True, salient=sparse("adaptive", attention_mass=mass, min_tokens=1)):
            step(model, batch)
        counts[mass] = chosen[-1].positions.shape[1]
    assert counts[0.3] < counts[0.95] and counts[0.3] % 64 == 0


@pytest.mark.parametrize("saliency", SALIENCIES)
def test_a_row_of_one_token_keeps_it(saliency):
    """All gradients together, since those of q and k are zero but for rounding: one key has all the attention."""
    model, ids = adapted("llama", torch.float32), torch.tensor([[7]])

    def gradients():
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).logits.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradients()
    with engine(model, strict=True, tiled_loss="never", salient=sparse(saliency=saliency)):
        assert relative_error(gradients(), expected) <= 1e-5


def test_too_many_adaptive_tokens_are_all_tokens(monkeypatch):
    said = []
    monkeypatch.setattr("hf_memeff.blocks.block.say_once", said.append)
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    expected = step(model, batch)
    with engine(model, strict=True, salient=sparse("adaptive", min_tokens=500)):
        got = step(model, batch)
        step(model, token_batch(2, LENGTH - 4))
    assert {message for message in said if "min_tokens" in message} == {
        "min_tokens=500 is above a batch's length and stands for all its tokens"
    }
    assert max(relative_error(got.gradients[n], g) for n, g in expected.gradients.items()) <= 1e-5
