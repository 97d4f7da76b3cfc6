"""attach, detach and memeff_status on models that already carry LoRA adapters."""

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model, inject_adapter_in_model

from helpers import fill_adapters, loss_and_gradients, tiny_model, token_batch, worst_relative_error
from hf_memeff import MespConfig, SageConfig, attach, detach, memeff_status

SETTINGS = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def plain(**settings):
    model = get_peft_model(tiny_model(), LoraConfig(**{**SETTINGS, **settings}))
    fill_adapters(model)
    return model


def shape_of(model):
    """Classes, instance attributes and hooks of every module."""
    return [
        (name, type(module), sorted(module.__dict__), len(module._forward_pre_hooks), module.__dict__.get("forward"))
        for name, module in model.named_modules()
    ]


def test_attached_lora_trains_with_lora_s_gradients_and_detaching_restores_the_model(ours):
    model = plain()
    before = shape_of(model)
    expected_loss, expected = loss_and_gradients(model, token_batch())
    attach(model, ours(mlp_tile_tokens=8))
    assert {block.path for block in memeff_status(model).blocks} == {"structured"}
    assert shape_of(model) != before
    loss, gradients = loss_and_gradients(model, token_batch())
    assert abs(loss - expected_loss) <= 1e-5 and worst_relative_error(gradients, expected) <= 1e-5
    detach(model)
    assert shape_of(model) == before and not memeff_status(model).attached
    assert loss_and_gradients(model, token_batch())[0] == expected_loss


def test_attaching_without_a_config_takes_the_defaults():
    model = plain()
    attach(model)
    assert memeff_status(model).attached and memeff_status(model).activation_store == "memory"


def test_attaching_again_takes_over_the_new_options(ours):
    model = plain()
    attach(model, ours(tiled_loss="never"))
    assert memeff_status(model).tiled_loss.path == "logits"
    attach(model, ours())
    assert memeff_status(model).tiled_loss.path == "tiled"
    detach(model)
    detach(model)
    assert not memeff_status(model).attached


def test_adapters_injected_without_a_peft_model_are_attached(ours):
    model = inject_adapter_in_model(LoraConfig(**SETTINGS), tiny_model())
    attach(model, ours())
    assert {block.path for block in memeff_status(model).blocks} == {"structured"}


def test_saved_files_of_an_attached_model_are_plain_lora(tmp_path):
    model = plain()
    attach(model)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_on_a_model_of_ours_it_changes_the_engine_and_the_saved_options(ours, tmp_path):
    model = get_peft_model(tiny_model(), ours(**SETTINGS))
    detach(model)
    assert not memeff_status(model).attached
    attach(model, ours(tiled_loss="never"))
    assert memeff_status(model).tiled_loss.path == "logits"
    model.save_pretrained(tmp_path)
    assert ours.from_pretrained(tmp_path).tiled_loss == "never"


def test_the_status_says_that_plain_loading_gives_plain_lora(ours):
    model = get_peft_model(tiny_model(), ours(**SETTINGS))
    assert "without config= gives plain LoRA" in str(memeff_status(model))
    expected = f"{ours.config_class.__name__}.from_pretrained(folder) to train it on with {ours.config_class.title}"
    assert expected in memeff_status(model).notes[-1]
    model = plain()
    attach(model, ours())
    assert expected in memeff_status(model).notes[-1]


def test_without_a_config_a_model_of_ours_keeps_its_own_options(ours):
    model = get_peft_model(tiny_model(), ours(**SETTINGS, tiled_loss="never"))
    detach(model)
    attach(model)
    assert memeff_status(model).tiled_loss.path == "logits"


@pytest.mark.parametrize(("made_with", "given"), [(MespConfig, SageConfig), (SageConfig, MespConfig)])
def test_another_method_than_the_model_was_made_with_is_refused(made_with, given):
    model = get_peft_model(tiny_model(), made_with(**SETTINGS))
    message = f"attach got a {given.__name__} for a model made with {made_with.__name__}, expected .* Fix: "
    with pytest.raises(ValueError, match=message):
        attach(model, given())
    assert memeff_status(model).attached


def test_a_plain_lora_model_changes_its_method_by_attaching_again():
    model = plain()
    attach(model, SageConfig())
    attach(model, MespConfig())
    assert "to train it on with MeSP" in memeff_status(model).notes[-1]


@pytest.mark.parametrize("wrapper", ["data_parallel", "compiled"])
def test_a_wrapped_model_is_found(wrapper):
    model = plain()
    wrapped = torch.nn.DataParallel(model) if wrapper == "data_parallel" else torch.compile(model, backend="eager")
    attach(wrapped)
    assert memeff_status(wrapped).attached and memeff_status(model).attached
    detach(wrapped)
    assert not memeff_status(model).attached


def test_strict_failing_on_a_model_of_ours_keeps_its_saved_options(ours, tmp_path):
    base = tiny_model()
    base.model.layers[1].input_layernorm = torch.nn.Sequential(base.model.layers[1].input_layernorm, torch.nn.Tanh())
    model = get_peft_model(base, ours(**SETTINGS))
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        attach(model, ours(strict=True))
    assert model.peft_config["default"].strict is False


# LoRA fields in the given config


@pytest.mark.parametrize(
    ("live", "given"),
    [
        ({}, {}),
        ({}, SETTINGS),
        ({}, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}),
        ({"target_modules": ["v_proj", "q_proj"]}, {"target_modules": ["q_proj", "v_proj"]}),
        ({"r": 8}, {}),
        ({"rank_pattern": {"q_proj": 2}}, {"rank_pattern": {"q_proj": 2}}),
        ({}, {"task_type": None, "inference_mode": True, "base_model_name_or_path": "elsewhere"}),
    ],
)
def test_lora_fields_that_repeat_the_live_adapter_s_are_taken(ours, live, given):
    attach(plain(**live), ours(**given))


@pytest.mark.parametrize(
    ("live", "given", "field"),
    [
        ({}, {"r": 16}, "r"),
        ({}, {"lora_alpha": 16}, "lora_alpha"),
        ({}, {"lora_dropout": 0.1}, "lora_dropout"),
        ({}, {"use_rslora": True}, "use_rslora"),
        ({}, {"target_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": ["q_proj", "v_proj"]}, {"target_modules": "all-linear"}, "target_modules"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({}, {"use_dora": True}, "use_dora"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_lora_fields_that_contradict_the_live_adapter_are_refused(ours, live, given, field):
    model = plain(**live)
    before = shape_of(model)
    with pytest.raises(ValueError, match=rf"attach got {field}=.*, expected .* Fix: leave {field} out"):
        attach(model, ours(**given))
    assert shape_of(model) == before


@pytest.mark.parametrize("model", ["bare", "loha"])
def test_models_without_a_lora_adapter_are_refused(model):
    model = tiny_model() if model == "bare" else get_peft_model(tiny_model(), LoHaConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"without LoRA layers, expected a model with a LoRA adapter.*Fix: "):
        attach(model)


def test_an_adapter_that_cannot_be_trained_is_refused():
    model = plain(target_modules=["q_proj"])
    model.peft_config["default"].megatron_config = {"num_layers": 2}
    with pytest.raises(ValueError, match="MeSP got megatron_config"):
        attach(model)


def test_an_option_broken_after_the_config_was_made_is_refused(ours):
    config = ours()
    config.tiled_loss = "sometimes"
    with pytest.raises(ValueError, match="got tiled_loss='sometimes'"):
        attach(plain(), config)


def test_an_unusable_folder_is_refused_and_changes_nothing(ours, tmp_path):
    (tmp_path / "file").write_text("")
    model = plain()
    before = shape_of(model)
    with pytest.raises(OSError, match=r"got .*expected .*Fix: "):
        attach(model, ours(activation_store="disk", activation_store_dir=tmp_path / "file"))
    assert shape_of(model) == before


def test_a_base_dtype_that_cannot_train_is_refused():
    model = plain(target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"float8.*expected float16"):
        attach(model)
