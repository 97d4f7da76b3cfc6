"""What both configs share, and case C35: every field of LoraConfig is LoRA's to the last gradient, or refused."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import config as lora_config

from helpers import fill_adapters, loss_and_gradients, tiny_model, token_batch, worst_relative_error


def test_it_is_a_lora_config_of_its_own_type(ours):
    config = ours()
    assert isinstance(config, LoraConfig) and isinstance(config, PeftConfig)
    assert config.peft_type is ours.peft_type and not config.is_prompt_learning


def test_fields_of_lora_config_keep_their_place(ours):
    """Positional arguments of a LoraConfig script mean the same."""
    stock = [item.name for item in dataclasses.fields(LoraConfig)]
    assert [item.name for item in dataclasses.fields(ours.config_class)][: len(stock)] == stock


def test_it_survives_pickle_and_copies(ours):
    config = ours(r=4, target_modules=["q_proj"], strict=True)
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), dataclasses.replace(config)):
        assert again == config and type(again) is ours.config_class


@pytest.mark.parametrize("rank", [0, -1, "8", 2.0])
def test_a_rank_that_is_no_positive_integer_is_refused(ours, rank):
    with pytest.raises(ValueError, match=r"Config got rank .* for 'r', expected an integer above 0. Fix: "):
        ours(r=rank)
    with pytest.raises(ValueError, match=r"Config got rank .* for 'q_proj', expected"):
        ours(rank_pattern={"q_proj": rank})


def test_what_lora_config_refuses_is_refused_with_its_message(ours):
    for wrong in ({"task_type": "NONSENSE"}, {"layers_pattern": "layers"}, {"lora_bias": True, "use_dora": True}):
        with pytest.raises(ValueError) as stock:
            LoraConfig(**wrong)
        with pytest.raises(ValueError) as error:
            ours(**wrong)
        assert str(error.value) == str(stock.value)


def test_variants_that_cannot_be_trained_are_refused(ours):
    with pytest.raises(
        ValueError, match=rf"{ours.config_class.title} got megatron_config, expected None: .* Fix: train"
    ):
        ours(megatron_config={"num_layers": 2})


BOOKKEEPING = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
}
"""Fields that say nothing about the adapter; the tests of files cover them."""

TESTED_ELSEWHERE = {
    "arrow_config": "needs several adapters: test_model_cases.py",
    "target_parameters": "needs experts: test_model_cases.py",
    "ensure_weight_tying": "needs tied embeddings: test_model_cases.py",
    "megatron_config": "refused: above",
    "monteclora_config": "its gradients cancel to below the tolerance here: test_peft_suite_findings.py",
    "megatron_core": "read with megatron_config only",
    "loftq_config": "its initialisation needs a quantiser",
    "corda_config": "its initialisation needs a calibration run",
    "lora_ga_config": "its initialisation needs a calibration run",
}

ALL = {"target_modules": "all-linear"}

SETTINGS: dict[str, dict[str, Any]] = {
    "r": {**ALL, "r": 3},
    "target_modules": {"target_modules": r".*\.(q|down)_proj"},
    "exclude_modules": {**ALL, "exclude_modules": ["k_proj"]},
    "lora_alpha": {**ALL, "lora_alpha": 3},
    "lora_dropout": {**ALL, "lora_dropout": 0.3},
    "fan_in_fan_out": {**ALL, "fan_in_fan_out": True},
    "bias": {**ALL, "bias": "all"},
    "use_rslora": {**ALL, "use_rslora": True},
    "modules_to_save": {**ALL, "modules_to_save": ["lm_head"]},
    "init_lora_weights": {**ALL, "init_lora_weights": "pissa"},
    "layers_to_transform": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "layers_pattern": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "rank_pattern": {**ALL, "rank_pattern": {"q_proj": 2, "down_proj": 5}},
    "alpha_pattern": {**ALL, "alpha_pattern": {"q_proj": 2, "down_proj": 5}},
    "trainable_token_indices": {**ALL, "trainable_token_indices": [3, 4, 5]},
    "eva_config": {**ALL, "init_lora_weights": "eva", "eva_config": lora_config.EvaConfig()},
    "use_dora": {**ALL, "use_dora": True},
    "velora_config": {**ALL, "velora_config": lora_config.VeloraConfig(num_groups=8)},
    "alora_invocation_tokens": {**ALL, "alora_invocation_tokens": [7, 8], "task_type": "CAUSAL_LM"},
    "use_qalora": {**ALL, "use_qalora": True},
    "qalora_group_size": {**ALL, "use_qalora": True, "qalora_group_size": 8},
    "layer_replication": {"target_modules": ["q_proj", "up_proj"], "layer_replication": [(0, 2), (1, 2)]},
    "runtime_config": {**ALL, "runtime_config": lora_config.LoraRuntimeConfig(ephemeral_gpu_offload=True)},
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "use_bdlora": {
        **ALL,
        "use_bdlora": lora_config.BdLoraConfig(nblocks=2, target_modules_bd_a=["q_proj"], match_strict=False),
    },
}
if hasattr(lora_config, "KasaConfig"):
    SETTINGS["kasa_config"] = {**ALL, "kasa_config": lora_config.KasaConfig()}


def test_c35_every_field_of_lora_config_has_a_place_in_these_tests():
    """A field that a new PEFT brings fails here until someone has looked at it."""
    fields = {item.name for item in dataclasses.fields(LoraConfig)}
    assert fields <= BOOKKEEPING | set(TESTED_ELSEWHERE) | set(SETTINGS), "a field of LoraConfig is not covered"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("field", SETTINGS)
def test_c35_loss_and_gradients_are_lora_s_with_each_field_set(ours, field):
    default = getattr(LoraConfig(), field)
    assert SETTINGS[field][field] != default
    results = []
    batch = token_batch()
    batch["input_ids"][:, 4:6] = torch.tensor([7, 8])  # aLoRA's invocation
    for config_cls in (LoraConfig, ours):
        family = "qwen2" if field in ("bias", "lora_bias") else "llama"
        torch.manual_seed(3)
        model = get_peft_model(tiny_model(family), config_cls(**{"r": 4, "task_type": "CAUSAL_LM", **SETTINGS[field]}))
        if field != "init_lora_weights":
            fill_adapters(model)
        results.append(loss_and_gradients(model, batch))
    (loss, gradients), (our_loss, our_gradients) = results
    assert abs(our_loss - loss) <= 1e-5
    assert worst_relative_error(our_gradients, gradients) <= 1e-5
