"""Reading and changing the token budget of an attached model."""

import pytest
import torch
from peft import LoraConfig

from helpers import adapted_model, loss_and_gradients, token_batch, worst_relative_error
from hf_memeff import MespConfig, SageConfig, attach
from hf_memeff.tuners.budget import change_token_budget, token_budget_of


def test_models_without_sage_have_no_budget_and_cannot_get_one():
    for model in (adapted_model(LoraConfig), adapted_model(MespConfig)):
        assert token_budget_of(model) is None
        with pytest.raises(ValueError, match=r"Someone got a model that doesn't run with SAGE, expected .* Fix: "):
            change_token_budget(model, 0.5, "Someone")


def test_it_is_changed_in_place_and_the_config_keeps_its_own():
    model = adapted_model(SageConfig, token_budget=0.25)
    assert change_token_budget(model, 1.0, "Someone") == 0.25 and token_budget_of(model) == 1.0
    assert model.peft_config["default"].token_budget == 0.25
    _, exact = loss_and_gradients(adapted_model(LoraConfig), token_batch())
    assert worst_relative_error(loss_and_gradients(model, token_batch())[1], exact) <= 1e-5
    assert change_token_budget(model, 0.25, "Someone") == 1.0
    assert worst_relative_error(loss_and_gradients(model, token_batch())[1], exact) > 1e-2


def test_an_adaptive_budget_can_be_changed_and_set_back():
    model = adapted_model(SageConfig, token_budget="adaptive")
    assert change_token_budget(model, 1.0, "Someone") == "adaptive" and token_budget_of(model) == 1.0
    assert change_token_budget(model, "adaptive", "Someone") == 1.0
    assert token_budget_of(model) == "adaptive"


def test_an_attached_and_wrapped_model_is_found():
    model = adapted_model(LoraConfig)
    attach(model, SageConfig(token_budget=0.75))
    wrapped = torch.nn.DataParallel(model)
    assert token_budget_of(wrapped) == 0.75
    change_token_budget(wrapped, 0.5, "Someone")
    assert token_budget_of(model) == 0.5
