"""The model that carries the adapters is found inside whatever is around it."""

import pytest
import torch
from peft import LoraConfig

from helpers import adapted_model
from hf_memeff.blocks.attached import attached_options
from hf_memeff.tuners.parts import model_parts


@pytest.mark.parametrize(
    "wrap", [lambda m: m, torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["bare", "dp", "c"]
)
def test_a_model_of_ours_is_found_with_its_tuner(ours, wrap):
    model = adapted_model(ours)
    for outer in (model, model.base_model):
        base, tuner = model_parts(wrap(outer))
        assert base is model.base_model.model and tuner is model.base_model
    assert attached_options(base) == ours().engine_options()


def test_a_lora_model_and_a_bare_one():
    model = adapted_model(LoraConfig)
    assert model_parts(model) == (model.base_model.model, model.base_model)
    assert model_parts(model.base_model.model) == (model.base_model.model, None)
    assert attached_options(model.base_model.model) is None
