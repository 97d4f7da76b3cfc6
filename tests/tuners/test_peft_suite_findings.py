"""Faults that PEFT's own tests found; `tests/peft_suite` runs those."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoHaConfig, LoraConfig, get_layer_status, get_peft_model, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import config as lora_config
from peft.utils.warning import PeftWarning
from torch.nn.modules.module import _global_module_registration_hooks

from helpers import fill_adapters, loss_and_gradients, needs_peft_021, tiny_model, token_batch
from hf_memeff import memeff_status

MONTECLORA = {
    "r": 4,
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "down_proj"],
    "monteclora_config": lora_config.MontecloraConfig(buffer_size=2),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_blocks_with_monteclora_run_once_and_give_lora_s_gradients(ours):
    """Each run of a layer takes the next sample of its buffer, so a block that ran twice would have other gradients."""
    results = []
    for config in (LoraConfig(**MONTECLORA), ours(**MONTECLORA, tiled_loss="never")):
        torch.manual_seed(3)
        model = get_peft_model(tiny_model(), config)
        fill_adapters(model)
        results.append(loss_and_gradients(model, token_batch()))
    assert memeff_status(model).blocks[0].path == "off"
    assert "MonteCLoRA draws a sample" in memeff_status(model).blocks[0].reason
    (loss, gradients), (our_loss, our_gradients) = results
    assert our_loss == loss
    assert our_gradients.keys() == gradients.keys()
    assert any("sampler" in name for name in gradients)
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in gradients.items())


def saved_adapter(ours, folder, **fields):
    """An adapter of the method on disk, and its logits."""
    model = get_peft_model(tiny_model(), ours(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **fields))
    fill_adapters(model)
    model.save_pretrained(folder)
    return model.eval()(**token_batch()).logits


def live_model(ours):
    return get_peft_model(tiny_model(), ours(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("is_trainable", [False, True])
def test_a_saved_adapter_is_loaded_into_a_live_model_under_a_new_name(ours, tmp_path, is_trainable):
    expected = saved_adapter(ours, tmp_path, activation_store="cpu")
    model = live_model(ours)
    result = model.load_adapter(tmp_path, adapter_name="second", is_trainable=is_trainable)
    assert not result.missing_keys
    assert type(model.peft_config["second"]) is ours.config_class
    assert model.peft_config["second"].activation_store == "cpu", "options come from the folder"
    assert {p.requires_grad for n, p in model.named_parameters() if ".second." in n} == {is_trainable}
    assert model.active_adapters == ["default"]
    model.set_adapter("second")
    assert torch.equal(model.eval()(**token_batch()).logits, expected)
    assert memeff_status(model).activation_store == "cpu"


def test_a_plain_lora_adapter_is_loaded_as_the_model_s_method(ours, tmp_path):
    stock = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    fill_adapters(stock)
    stock.save_pretrained(tmp_path)
    model = live_model(ours)
    model.load_adapter(tmp_path, "b", is_trainable=True)
    model.set_adapter("b")
    batch = token_batch()
    (loss, gradients), (our_loss, our_gradients) = (loss_and_gradients(m, batch) for m in (stock, model))
    assert abs(our_loss - loss) <= 1e-5
    assert {name.replace(".b.", ".default.") for name in our_gradients} == gradients.keys()
    assert {block.path for block in memeff_status(model).blocks} == {"structured"}


def test_what_peft_refuses_to_load_is_refused_with_its_message(ours, tmp_path):
    get_peft_model(tiny_model(), LoHaConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    for model, other in ((live_model(ours), ours.peft_type), (live_model(LoraConfig), "PeftType.LORA")):
        with pytest.raises(ValueError, match=rf"different peft types\. Found {other!s} and PeftType.LOHA"):
            model.load_adapter(tmp_path, "b")
        with pytest.raises(ValueError, match=r"Can't find 'adapter_config.json'"):
            model.load_adapter(tmp_path / "nowhere", "b")
        assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_loads_into_itself(ours, tmp_path, duplicate):
    saved_adapter(ours, tmp_path)
    model = live_model(ours)
    other = duplicate(model)
    other.load_adapter(tmp_path, "b")
    assert list(other.peft_config) == ["default", "b"]
    assert list(model.peft_config) == ["default"]


def test_a_deleted_model_is_freed_at_once(ours):
    gc.disable()
    try:
        model = live_model(ours)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_no_hook_of_torch_stays_behind(ours):
    before = len(_global_module_registration_hooks)
    live_model(ours)
    inject_adapter_in_model(ours(r=2, target_modules=["v_proj"]), tiny_model())
    gc.collect()
    assert len(_global_module_registration_hooks) == before


def test_a_layer_prints_and_reports_itself_as_peft_s_own(ours):
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 2)), ours(r=1, target_modules=["0"]))
    layer = model.base_model.model[0]
    assert type(layer) is not lora.Linear
    assert repr(layer).startswith("lora.Linear(\n")
    assert [status.module_type for status in get_layer_status(model)] == ["lora.Linear"]


def test_an_adapter_of_a_custom_model_is_tagged_as_lora(ours, tmp_path):
    """PEFT takes tags from a model of transformers, and gives "lora" to its own type alone."""
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 2)), ours(r=1, target_modules=["0"]))
    model.save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data["tags"] == sorted({"hf_memeff", "lora", ours.name})
    text = (tmp_path / "README.md").read_text().strip()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().strip() == text


@needs_peft_021
def test_saving_shards_of_an_adapter_warns(ours, tmp_path):
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 2)), ours(r=1, target_modules=["0"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PeftWarning)
        model.save_pretrained(tmp_path)
    model.base_model.model[0].lora_A["default"].weight.data = torch.zeros(3)
    with pytest.warns(PeftWarning, match=r"got 1 factors of shapes such as \(3,\) .*ZeRO-3 / FSDP shards"):
        model.save_pretrained(tmp_path)
