"""Both methods' models: attaching, refusing before the model is changed, and undoing."""

import copy
import gc
import io

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from torch import nn

from helpers import (
    adapted_model,
    assert_untouched,
    fill_adapters,
    logits_of,
    loss_and_gradients,
    needs_peft_021,
    tiny_model,
    token_batch,
    worst_relative_error,
)
from hf_memeff import memeff_status
from hf_memeff.blocks.attach import is_attached
from hf_memeff.tuners.layer import MemeffLinear


def test_it_is_lora_s_model_with_the_engine_on(ours):
    model = adapted_model(ours)
    assert type(model.base_model) is ours.model_class and isinstance(model, PeftModel)
    status = memeff_status(model)
    assert status.attached and {b.path for b in status.blocks} == {"structured"}
    assert torch.equal(logits_of(model), logits_of(adapted_model(LoraConfig)))


def test_only_the_adapter_is_trained(ours):
    names = {name for name, parameter in adapted_model(ours).named_parameters() if parameter.requires_grad}
    assert names == {
        name for name, parameter in adapted_model(LoraConfig).named_parameters() if parameter.requires_grad
    }


def test_unload_gives_the_base_model_back(ours):
    model = adapted_model(ours)
    base = model.unload()
    fresh = tiny_model()
    assert_untouched(base, fresh)
    assert torch.equal(logits_of(base), logits_of(fresh))


def test_a_model_s_own_tags_survive(ours):
    base = tiny_model()
    base.add_model_tags(["mine", "lora"])
    model = get_peft_model(base, ours(target_modules=["q_proj"]))
    assert base.model_tags == ["mine", "lora", "hf_memeff", ours.name]
    model.unload()
    assert base.model_tags == ["mine", "lora"]


def test_deleting_adapters_follows_lora_and_the_last_one_takes_the_engine_off(ours):
    model = adapted_model(ours)
    model.add_adapter("b", ours(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="was active which is now deleted"):
        model.delete_adapter("default")
    assert model.active_adapter == "b" and memeff_status(model).attached
    assert not any(".default." in name for name in model.state_dict())
    model.delete_adapter("b")
    assert not is_attached(model.base_model.model)
    assert torch.equal(logits_of(model.base_model.model), logits_of(tiny_model()))


def test_disabled_adapters_give_the_base_model(ours):
    model = adapted_model(ours, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), logits_of(tiny_model()))


def test_copies_train_their_own_weights(ours):
    """A deepcopy, an unpickled copy and the original stay apart."""
    model = adapted_model(ours)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        fill_adapters(twin, seed=2)
        other = adapted_model(ours)
        fill_adapters(other, seed=2)
        loss, gradients = loss_and_gradients(twin, token_batch())
        expected_loss, expected = loss_and_gradients(other, token_batch())
        assert abs(loss - expected_loss) <= 1e-6 and worst_relative_error(gradients, expected) <= 1e-6
        assert memeff_status(twin).attached


# refusing before the model is changed

COLLIDING = ("", "a.b", "a/b", "lora_", "lora_A", "base_layer", "__base__", "modules_to_save")
COLLIDING += ("weight", "keys", "training")


@pytest.mark.parametrize("name", COLLIDING)
def test_adapter_names_that_collide_with_key_parts_are_refused(ours, name):
    base = tiny_model()
    config = ours(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"got the adapter name .*, expected a name .* Fix: choose another"):
        get_peft_model(base, config, adapter_name=name)
    assert_untouched(base, tiny_model())
    model = get_peft_model(base, config)
    with pytest.raises(ValueError, match="got the adapter name"):
        model.add_adapter(name, copy.copy(config))
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("name", ["model", "layers", "0", "q_proj"])
def test_a_module_s_name_is_refused_where_peft_would_drop_other_adapters_from_a_file(ours, name):
    fields = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_model(), ours(**fields))
    with pytest.raises(ValueError, match=f"got the adapter name '{name}', expected one that no module"):
        model.add_adapter(name, ours(**fields))
    assert list(model.peft_config) == ["default"]
    model = get_peft_model(tiny_model(), ours(**fields), adapter_name=name)
    with pytest.raises(ValueError, match=f"got the adapter name '{name}', expected one that no module"):
        model.add_adapter("b", ours(**fields))
    assert list(model.peft_config) == [name]


@pytest.mark.parametrize("name", ["model", "layers", "0", "q_proj"])
def test_a_sole_adapter_with_a_module_s_name_saves_and_loads(ours, tmp_path, name):
    model = adapted_model(ours, name=name)
    fill_adapters(model)
    before = logits_of(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_model(), tmp_path / name, adapter_name=name)
    assert torch.equal(logits_of(again), before)


@pytest.mark.parametrize("name", ["default", "a", "b", "ref", "r", "lora", "policy_2", "x-1"])
def test_other_names_save_and_load(ours, tmp_path, name):
    model = adapted_model(ours, name=name)
    other = "other"
    model.add_adapter(other, ours(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    fill_adapters(model)
    before = logits_of(model)
    model.save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    config = ours.from_pretrained(folder)
    again = PeftModel.from_pretrained(tiny_model(), folder, adapter_name=name, config=config)
    assert torch.equal(logits_of(again), before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_base_dtype_that_cannot_train_is_refused(ours, dtype):
    base = tiny_model()
    projection = base.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=r"got weights of dtype .* in 'model.layers.1.mlp.up_proj'.*expected.*Fix: "):
        get_peft_model(base, ours(target_modules=["q_proj"]))
    assert not any(isinstance(module, LoraLayer) for module in base.modules())


def test_targets_that_match_nothing_get_peft_s_own_error(ours):
    errors = []
    for config_cls in (LoraConfig, ours):
        with pytest.raises(ValueError) as error:
            get_peft_model(tiny_model(), config_cls(target_modules=["nothing_like_this"]))
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "not found in the base model" in errors[1]


def test_an_unusable_store_folder_is_refused_before_the_model_is_changed(ours, tmp_path):
    (tmp_path / "file").write_text("")
    base = tiny_model()
    config = ours(target_modules=["q_proj"], activation_store="disk", activation_store_dir=tmp_path / "file")
    with pytest.raises(OSError, match=r"got .*expected .*Fix: "):
        get_peft_model(base, config)
    assert_untouched(base, tiny_model())


def odd_model():
    """A model in which one block has no known structure: its norm is of an unknown kind."""
    base = tiny_model()
    base.model.layers[1].input_layernorm = nn.Sequential(base.model.layers[1].input_layernorm, nn.Tanh())
    return base


def test_strict_refuses_a_fallback_and_takes_the_adapter_back(ours):
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    assert [b.path for b in memeff_status(get_peft_model(odd_model(), ours(**config))).blocks] == [
        "structured",
        "recompute",
    ]
    base = odd_model()
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        get_peft_model(base, ours(**config, strict=True))
    assert_untouched(base, odd_model())
    model = get_peft_model(base, ours(**config))
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        model.add_adapter("b", ours(**config, strict=True))
        model.set_adapter("b")


def test_tiled_loss_always_on_a_model_without_a_causal_head_is_refused(ours):
    with pytest.raises(ValueError, match=r"always.*expected a causal language model"):
        get_peft_model(tiny_model().model, ours(target_modules=["q_proj"], tiled_loss="always"))


# PEFT features that look at the adapter's type


def test_injecting_into_a_model_attaches_too(ours):
    model = inject_adapter_in_model(ours(r=4, target_modules=["q_proj"]), tiny_model())
    assert memeff_status(model).attached
    fill_adapters(model)
    loss, gradients = loss_and_gradients(model, token_batch())
    stock = inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"]), tiny_model())
    fill_adapters(stock)
    stock_loss, expected = loss_and_gradients(stock, token_batch())
    assert abs(loss - stock_loss) <= 1e-5 and worst_relative_error(gradients, expected) <= 1e-5


@needs_peft_021
def test_a_pissa_adapter_converts_to_lora(ours, tmp_path):
    """PEFT's path_initial_model_for_weight_conversion: the result fits the unchanged base model."""
    model = get_peft_model(
        tiny_model(), ours(r=4, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    )
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    trained = logits_of(model)
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    assert list(model.peft_config) == ["default"]
    again = PeftModel.from_pretrained(tiny_model(), tmp_path / "converted")
    assert (logits_of(again) - trained).abs().max() <= 1e-4


def test_add_weighted_adapter_works(ours):
    results = []
    for config_cls in (LoraConfig, ours):
        model = adapted_model(config_cls, name="a")
        model.add_adapter("b", config_cls(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        fill_adapters(model)
        model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "mix", combination_type="linear")
        model.set_adapter("mix")
        results.append(logits_of(model))
    assert torch.equal(*results)


def test_wrapping_twice_warns_as_lora_does(ours):
    """Case C42: a script that loads an adapter and then wraps again would train a new one."""
    for config_cls in (LoraConfig, ours):
        model = adapted_model(config_cls)
        with pytest.warns(UserWarning, match="modify a model with PEFT for a second time"):
            get_peft_model(model, config_cls(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_unloading_frees_the_adapters(ours):
    import weakref

    model = adapted_model(ours)
    layer = weakref.ref(model.base_model.model.model.layers[0].mlp.gate_proj)
    base = model.unload()
    del model
    gc.collect()
    assert layer() is None and base is not None


def test_layers_outside_blocks_keep_only_their_input(ours):
    assert type(adapted_model(ours).base_model.model.model.layers[0].mlp.gate_proj) is MemeffLinear
    model = adapted_model(ours, target_modules=["lm_head"])
    assert type(model.base_model.model.lm_head) is MemeffLinear
    model.base_model.detach_engine()
    assert type(model.base_model.model.lm_head) is lora.Linear
