"""What blocks are told about a batch: labels, padding, packing; nested, interrupted, missing, run again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from blocks._models import LENGTH, adapted, engine, step
from blocks._tolerances import relative_error
from helpers import token_batch
from hf_memeff.blocks import batch_tokens
from hf_memeff.blocks.batch_tokens import BatchTokens, current_tokens, read_tokens, recall, remember
from hf_memeff.blocks.options import SalientTokens


def sparse(budget=0.3, **settings):
    return SalientTokens(token_budget=budget, **{"dense_layers": (), **settings})


class Model(nn.Module):
    def forward(self, input_ids=None, attention_mask=None, labels=None, shift_labels=None, inputs_embeds=None):
        return current_tokens()


class ModelForTokenClassification(Model):
    pass


IDS = torch.arange(8).view(2, 4)


def test_labels_say_which_rows_predict():
    labels = torch.tensor([[-100, -100, 5, 6], [1, -100, -100, -100]])
    assert read_tokens(Model(), (IDS,), {"labels": labels}).predicted.tolist() == [
        [False, True, True, False],
        [False, False, False, False],
    ]
    shifted = read_tokens(Model(), (), {"input_ids": IDS, "shift_labels": labels}).predicted
    assert torch.equal(shifted, labels != -100)
    own = read_tokens(ModelForTokenClassification(), (), {"input_ids": IDS, "labels": labels}).predicted
    assert torch.equal(own, labels != -100)


@pytest.mark.parametrize("labels", [torch.tensor([1, 0]), torch.zeros(2, 3), torch.zeros(2, 40), None])
def test_labels_of_other_shapes_are_not_rows(labels):
    """A sequence classifier's, for one class or several, more or fewer than tokens."""
    assert read_tokens(Model(), (), {"input_ids": IDS, "labels": labels}).predicted is None


def test_padding_and_packing():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    tokens = read_tokens(Model(), (IDS, mask), {"position_ids": torch.tensor([[0, 1, 0, 1]])})
    assert torch.equal(tokens.real, mask.bool()) and tokens.segments.tolist() == [[0, 0, 1, 1]]
    assert read_tokens(Model(), (IDS, mask[None, None]), {}).real is None


def test_packing_told_by_cumulative_lengths_alone():
    """As a padding-free collator gives them that was asked for no positions."""
    ids, lengths = torch.arange(6)[None], torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    tokens = read_tokens(Model(), (), {"input_ids": ids, "cu_seq_lens_q": lengths})
    assert tokens.segments.tolist() == [[0, 0, 1, 1, 1, 2]]
    kept = tokens.always((1, 6), torch.device("cpu"), 1, True)
    assert kept.tolist() == [[True, True, True, False, True, True]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    both = read_tokens(Model(), (), {"input_ids": ids, "cu_seq_lens_q": lengths, "position_ids": positions})
    assert both.segments.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert read_tokens(Model(), (IDS,), {"cu_seq_lens_q": lengths}).segments is None


def test_a_decoder_with_more_rows_than_the_model_was_given_goes_by_its_own():
    """A soft prompt in front: the outer labels and padding are of other rows."""
    outer = read_tokens(Model(), (IDS,), {"labels": IDS, "attention_mask": torch.ones_like(IDS)})
    longer = torch.zeros(2, 6, 3)
    inner = read_tokens(Model(), (), {"inputs_embeds": longer, "attention_mask": torch.ones(2, 6)}, outer)
    assert inner.predicted is None and inner.real.shape == (2, 6)
    same = read_tokens(Model(), (), {"inputs_embeds": longer[:, :4]}, outer)
    assert same.predicted is outer.predicted and same.real is outer.real


def test_an_interrupted_step_leaves_nothing_behind():
    """``KeyboardInterrupt`` skips forward hooks, even those that always run."""
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH, "right")
    other = token_batch(2, LENGTH - 5)
    core = model.get_base_model().model

    def interrupt(*_):
        raise KeyboardInterrupt

    with engine(model, strict=True, salient=sparse()):
        expected = step(model, other)
        handle = core.norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**batch)
        handle.remove()
        got = step(model, other)
        assert current_tokens() is None
    assert all(torch.equal(got.gradients[n], g) for n, g in expected.gradients.items())


def test_an_error_in_a_forward_leaves_nothing_behind():
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)

    def fail(*_):
        raise ValueError("here")

    with engine(model, strict=True, salient=sparse()) as base:
        handle = base.model.norm.register_forward_hook(fail)
        with pytest.raises(ValueError, match="here"):
            model(**batch)
        handle.remove()
        assert current_tokens() is None


def test_tokens_are_remembered_as_long_as_the_hidden_states_live():
    hidden, tokens = torch.randn(2, 3), BatchTokens()
    remember(hidden, tokens)
    assert recall(hidden) is tokens and recall(hidden.detach()) is tokens and recall(hidden[:1]) is None
    key = batch_tokens._key(hidden)
    del hidden
    gc.collect()
    remember(torch.randn(1), BatchTokens())
    assert key not in batch_tokens._calls or batch_tokens._calls[key][1] is not tokens


@pytest.mark.parametrize("saliency", ["attention", "random", "gradient"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_c04_a_checkpoint_around_several_blocks_is_refused(saliency, use_reentrant):
    """The second block of the re-run gets new hidden states, from which its tokens cannot be told."""
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH, "right") | {"use_cache": False}
    model.enable_input_require_grads()
    with engine(model, strict=True, salient=sparse(saliency=saliency)) as base:
        first, second = base.model.layers

        class Both(nn.Module):
            def forward(self, hidden, **kwargs):
                return checkpoint(lambda h: second(first(h, **kwargs), **kwargs), hidden, use_reentrant=use_reentrant)

        base.model.layers = nn.ModuleList([Both()])
        base.model.config.num_hidden_layers = 1
        try:
            loss = model(**batch).loss
            with pytest.raises(RuntimeError, match=r"run again .* several blocks.* Fix: take the checkpoint away"):
                loss.backward()
        finally:
            base.model.layers = nn.ModuleList([first, second])
            base.model.config.num_hidden_layers = 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_batch_without_labels_asks_the_last_tokens(implementation):
    """All labels -100 is an ordinary batch under truncation; its gradient is zero, not an error."""
    model = adapted("llama", torch.float32, overrides={"attn_implementation": implementation})
    batch = token_batch(2, LENGTH)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with engine(model, strict=True, salient=sparse()):
        loss = model(**batch, num_items_in_batch=torch.tensor(1)).loss
        loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    half = token_batch(2, LENGTH)
    half["labels"][1] = -100
    with engine(model, strict=True, salient=sparse(0.999999)):
        got = step(model, half)
    expected = step(model, half)
    assert max(relative_error(got.gradients[n], g) for n, g in expected.gradients.items()) <= 1e-5


def test_missing_labels_are_said_once(monkeypatch):
    said = []
    monkeypatch.setattr("hf_memeff.blocks.block.say_once", said.append)
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    del batch["labels"]
    with engine(model, strict=True, salient=sparse()):
        model(**batch).logits.sum().backward()
    assert any("sees no labels" in message for message in said)
