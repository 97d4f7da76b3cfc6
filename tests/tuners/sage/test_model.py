"""SageModel in PEFT's hands while its gradients are approximate: budget below 1."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from helpers import (
    VOCAB,
    adapted_model,
    fill_adapters,
    logits_of,
    loss_and_gradients,
    tiny_model,
    token_batch,
    worst_relative_error,
)
from hf_memeff import MespConfig, SageConfig, attach, detach, memeff_status
from hf_memeff.tuners.budget import token_budget_of

SPARSE = {"token_budget": 0.25, "sink_tokens": 1, "dense_layers": ()}


def cosine(got, expected):
    got, expected = (torch.cat([value.flatten() for value in values.values()]) for values in (got, expected))
    return torch.nn.functional.cosine_similarity(got, expected, dim=0).item()


def test_the_forward_is_lora_s_and_every_adapter_receives_an_approximate_gradient():
    loss, exact = loss_and_gradients(adapted_model(LoraConfig), token_batch())
    got_loss, got = loss_and_gradients(adapted_model(SageConfig, **SPARSE), token_batch())
    assert got_loss == pytest.approx(loss, abs=1e-6)
    assert set(got) == set(exact) and all(value.abs().max() > 0 for value in got.values())
    assert all((got[name] - value).norm() > 1e-3 * value.norm() for name, value in exact.items())
    assert 0.1 < cosine(got, exact) < 0.99


RANDOM = {**SPARSE, "saliency": "random"}
"""Attention of an untrained model falls on the first tokens, which would hide what else is kept."""


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (SPARSE, {"saliency": "gradient"}),
        (SPARSE, {"saliency": "value_norm"}),
        (SPARSE, {"saliency": "random"}),
        (SPARSE, {"token_budget": 0.5}),
        (RANDOM, {"sink_tokens": 4}),
        (SPARSE, {"keep_last": False}),
        (SPARSE, {"dense_layers": (0,)}),
        (SPARSE, {"dense_layers": (-1,)}),
        (RANDOM, {"backward_keys": "all"}),
        (SPARSE, {"query_rows": "last"}),
        (SPARSE, {"query_rows": 3}),
    ],
)
def test_each_field_changes_the_gradient_and_none_the_loss(base, change):
    loss, gradients = loss_and_gradients(adapted_model(SageConfig, **base), token_batch())
    changed_loss, changed = loss_and_gradients(adapted_model(SageConfig, **{**base, **change}), token_batch())
    assert changed_loss == pytest.approx(loss, abs=1e-6)
    assert worst_relative_error(changed, gradients) > 1e-3


@pytest.mark.parametrize("change", [{"attention_mass": 0.95}, {"min_tokens": 200}])
def test_the_fields_of_the_adaptive_budget_change_the_gradient(change):
    settings = {"token_budget": "adaptive", "sink_tokens": 1, "dense_layers": ()}
    batch = token_batch(rows=1, length=300)
    _, gradients = loss_and_gradients(adapted_model(SageConfig, **settings, attention_mass=0.5), batch)
    _, changed = loss_and_gradients(adapted_model(SageConfig, **{**settings, "attention_mass": 0.5, **change}), batch)
    assert worst_relative_error(changed, gradients) > 1e-3


def test_dense_layers_alone_make_the_gradient_exact():
    _, exact = loss_and_gradients(adapted_model(LoraConfig), token_batch())
    _, got = loss_and_gradients(adapted_model(SageConfig, token_budget=0.25, dense_layers=(0, 1)), token_batch())
    assert worst_relative_error(got, exact) <= 1e-5


def test_copies_train_as_the_original():
    model = adapted_model(SageConfig, **SPARSE)
    expected = loss_and_gradients(model, token_batch())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        loss, gradients = loss_and_gradients(twin, token_batch())
        assert loss == expected[0] and worst_relative_error(gradients, expected[1]) == 0


def test_disabled_adapters_and_evaluation_are_lora_s():
    model, stock = adapted_model(SageConfig, **SPARSE), adapted_model(LoraConfig)
    assert torch.equal(logits_of(model), logits_of(stock))
    with model.disable_adapter():
        assert torch.equal(logits_of(model), logits_of(tiny_model()))
    ids = torch.randint(3, VOCAB, (2, 7))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(input_ids=ids, **settings), stock.generate(input_ids=ids, **settings))


def test_the_active_adapter_s_budget_counts():
    model = adapted_model(SageConfig, **SPARSE)
    model.add_adapter("b", SageConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", token_budget=0.75))
    fill_adapters(model)
    assert token_budget_of(model) == 0.25
    model.set_adapter("b")
    assert token_budget_of(model) == 0.75
    model.set_adapter("default")
    _, got = loss_and_gradients(model, token_batch())
    assert token_budget_of(model) == 0.25 and cosine(got, loss_and_gradients(detached(model), token_batch())[1]) > 0.1


def test_attaching_again_changes_the_budget_of_this_and_of_later_runs(tmp_path):
    model = adapted_model(SageConfig, **SPARSE)
    attach(model, SageConfig(token_budget=0.75))
    assert token_budget_of(model) == 0.75
    model.save_pretrained(tmp_path)
    assert SageConfig.from_pretrained(tmp_path).token_budget == 0.75


def detached(model):
    detach(model)
    return model


def test_an_adapter_of_another_method_is_refused_by_peft():
    model = adapted_model(SageConfig)
    with pytest.raises(ValueError, match="different peft types"):
        model.add_adapter("b", MespConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_a_reloaded_model_trains_with_the_saved_budget(tmp_path):
    model = adapted_model(SageConfig, **SPARSE)
    model.save_pretrained(tmp_path)
    config = SageConfig.from_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_model(), tmp_path, config=config, is_trainable=True)
    loss, gradients = loss_and_gradients(model, token_batch())
    got_loss, got = loss_and_gradients(again, token_batch())
    assert got_loss == loss and worst_relative_error(got, gradients) == 0


def test_attach_and_detach_turn_a_lora_model_s_gradients_sparse_and_back():
    model = adapted_model(LoraConfig)
    _, exact = loss_and_gradients(model, token_batch())
    attach(model, SageConfig(**SPARSE))
    _, sparse = loss_and_gradients(model, token_batch())
    made = adapted_model(SageConfig, **SPARSE)
    assert worst_relative_error(sparse, loss_and_gradients(made, token_batch())[1]) == 0
    detach(model)
    assert worst_relative_error(loss_and_gradients(model, token_batch())[1], exact) == 0


def test_a_model_whose_attention_cannot_be_scored_is_refused_and_left_as_it_was():
    base = tiny_model("mixtral")
    settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    with pytest.raises(ValueError, match=r"got saliency='attention' on a Mixtral.*expected.*Fix: "):
        get_peft_model(base, SageConfig(**settings))
    assert list(base.state_dict()) == list(tiny_model("mixtral").state_dict())
    with pytest.warns(UserWarning, match="expert parameters"):
        model = get_peft_model(base, SageConfig(**settings, token_budget=1.0))
    assert memeff_status(model).attached
