"""Files on disk: stock PEFT reads what we write, we read what stock PEFT writes, and both files are data."""

import dataclasses
import json
import os
import subprocess
import threading

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraConfig as StockConfig
from peft.utils import PeftType

from helpers import (
    fill_adapters,
    loss_and_gradients,
    needs_peft_021,
    run_python,
    tiny_model,
    token_batch,
    worst_relative_error,
)
from hf_memeff import memeff_status
from hf_memeff.tuners.portable import OPTIONS_NAME, write_json

IDS = torch.arange(3, 40)[None]


@pytest.fixture
def saved(ours, tmp_path):
    """Folder "adapter" saved from a model of ours with non-zero adapters, folder "base", and the logits."""
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    config = ours(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", tiled_loss="never", mlp_tile_tokens=8, strict=True
    )
    model = get_peft_model(base, config)
    fill_adapters(model, 0.3)
    model.eval()
    with torch.no_grad():
        torch.save(model(input_ids=IDS).logits, tmp_path / "logits.pt")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path


def stock_check(folder, adapter="adapter", hide_package=True) -> subprocess.CompletedProcess:
    """Load a folder in stock PEFT in a fresh process: any warning is an error, logits have to agree to 1e-6."""
    return run_python(
        f"""
import sys, warnings, torch, transformers
warnings.simplefilter('error', UserWarning); warnings.simplefilter('error', RuntimeWarning)
from peft import PeftModel, LoraModel
base = transformers.AutoModelForCausalLM.from_pretrained({str(folder / "base")!r})
model = PeftModel.from_pretrained(base, {str(folder / adapter)!r}).eval()
with torch.no_grad():
    error = (model(input_ids=torch.arange(3, 40)[None]).logits - torch.load({str(folder / "logits.pt")!r})).abs().max()
assert error <= 1e-6, error
assert type(model.base_model) is LoraModel
print('loaded', sum(k.split('.')[0] == 'hf_memeff' and m is not None for k, m in sys.modules.items()))
""",
        hide_package=hide_package,
    )


def test_c10_stock_peft_loads_the_folder_without_this_package_and_without_a_warning(saved):
    result = stock_check(saved)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["loaded", "0"]
    assert result.stderr.count("Warning") == result.stderr.count("FutureWarning"), result.stderr


def test_c10_loading_by_name_gives_plain_lora_and_with_config_gives_ours(ours, saved):
    plain = PeftModel.from_pretrained(tiny_model(), saved / "adapter")
    assert plain.peft_type == PeftType.LORA and not memeff_status(plain).attached
    config = ours.from_pretrained(saved / "adapter")
    model = PeftModel.from_pretrained(tiny_model(), saved / "adapter", config=config, is_trainable=True)
    assert model.peft_type == ours.peft_type and {b.path for b in memeff_status(model).blocks} == {"structured"}
    expected = torch.load(saved / "logits.pt")
    for loaded in (plain, model):
        with torch.no_grad():
            assert torch.equal(loaded.eval()(input_ids=IDS).logits, expected)


def test_c10_our_class_in_the_file_needs_the_import_and_then_loads(ours, saved):
    path = saved / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace('"LORA"', f'"{ours.peft_type.value}"'))
    model = PeftModel.from_pretrained(tiny_model(), saved / "adapter")
    assert type(model.peft_config["default"]) is ours.config_class


def test_adapter_config_holds_json_plain_lora_keys_only(saved):
    data = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert data["peft_type"] == "LORA"
    known = {item.name for item in dataclasses.fields(StockConfig)} - {"runtime_config"}
    assert set(data) == known
    assert data["target_modules"] == sorted(data["target_modules"])


def test_tensors_and_their_names_are_lora_s(ours, saved, tmp_path):
    from safetensors.torch import load_file

    stock = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    fill_adapters(stock, 0.3)
    stock.save_pretrained(tmp_path / "stock")
    ours = load_file(saved / "adapter" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "stock" / "adapter_model.safetensors")
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_options_file_holds_method_version_and_options_but_no_path(ours, saved, tmp_path):
    data = json.loads((saved / "adapter" / OPTIONS_NAME).read_text())
    assert data["method"] == ours.name and data["hf_memeff_version"] == "0.1.0"
    assert data["tiled_loss"] == "never" and data["mlp_tile_tokens"] == 8 and data["strict"] is True
    ours(activation_store="disk", activation_store_dir=str(tmp_path)).save_pretrained(tmp_path / "other")
    written = (tmp_path / "other" / OPTIONS_NAME).read_text() + (tmp_path / "other" / "adapter_config.json").read_text()
    assert str(tmp_path) not in written
    assert ours.from_pretrained(tmp_path / "other").activation_store == "disk"


def test_round_trip_keeps_every_field(ours, tmp_path):
    config = ours(
        r=5,
        lora_alpha=7,
        lora_dropout=0.25,
        target_modules=r".*\.layers\..*\.(q|v)_proj",
        rank_pattern={"q_proj": 2},
        alpha_pattern={"v_proj": 3},
        modules_to_save=["lm_head"],
        use_rslora=True,
        bias="lora_only",
        task_type="CAUSAL_LM",
        base_model_name_or_path="some/model",
        revision="main",
        activation_store="cpu",
        tiled_loss="always",
        loss_tile_bytes=2**20,
        mlp_tile_tokens=32,
        strict=True,
    )
    config.save_pretrained(tmp_path)
    again = ours.from_pretrained(tmp_path)
    assert type(again) is ours.config_class and again.to_dict() == config.to_dict()
    assert type(PeftConfig.from_pretrained(tmp_path)) is LoraConfig


def test_a_plain_lora_adapter_can_be_trained_on(ours, tmp_path):
    stock = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    fill_adapters(stock)
    stock.save_pretrained(tmp_path)
    assert ours.from_pretrained(tmp_path).engine_options() == ours.config_class().engine_options()
    config = ours.from_pretrained(tmp_path, **ours.exact)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path, config=config, is_trainable=True)
    batch = token_batch()
    loss, gradients = loss_and_gradients(model, batch)
    stock_loss, stock_gradients = loss_and_gradients(stock, batch)
    assert abs(loss - stock_loss) <= 1e-6
    assert worst_relative_error(gradients, stock_gradients) <= 1e-5


def test_training_on_from_a_saved_adapter_continues_lora_s_run(ours, saved):
    """Two optimizer steps after reloading give the parameters that stock LoRA gets from the same folder."""
    results = []
    for config in (None, ours.from_pretrained(saved / "adapter")):
        model = PeftModel.from_pretrained(tiny_model(), saved / "adapter", config=config, is_trainable=True)
        model.train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(2):
            model(**token_batch(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({n: p.detach().double() for n, p in model.named_parameters() if p.requires_grad})
    assert worst_relative_error(results[1], results[0]) <= 1e-5
    start = PeftModel.from_pretrained(tiny_model(), saved / "adapter").state_dict()
    assert any(not torch.equal(start[n].double(), value) for n, value in results[1].items())


def test_a_second_adapter_joins_by_add_adapter_then_load_adapter(ours, saved):
    model = get_peft_model(tiny_model(), ours(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    folder = saved / "adapter"
    model.add_adapter("b", ours.from_pretrained(folder))
    result = model.load_adapter(folder, "b")
    assert not result.unexpected_keys and not [key for key in result.missing_keys if ".b." in key]
    model.set_adapter("b")
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, torch.load(saved / "logits.pt"))


def test_loading_onto_the_meta_device_first_waits_with_the_self_check(ours, saved):
    config = ours.from_pretrained(saved / "adapter")
    folder = saved / "adapter"
    model = PeftModel.from_pretrained(tiny_model(), folder, config=config, is_trainable=True, low_cpu_mem_usage=True)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, torch.load(saved / "logits.pt"))
    model.train()(**token_batch()).loss.backward()
    assert {(block.path, block.reason) for block in memeff_status(model).blocks} == {("structured", "")}


def test_a_subfolder_is_read(ours, saved):
    config = ours.from_pretrained(saved, subfolder="adapter")
    assert config.r == 4 and config.tiled_loss == "never"


def test_a_named_adapter_is_saved_in_its_folder_with_both_files(ours, tmp_path):
    model = get_peft_model(tiny_model(), ours(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "first")
    model.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path / "first")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        OPTIONS_NAME,
    ]


def test_a_base_model_without_task_type_is_recorded_and_read_back(ours, tmp_path):
    model = get_peft_model(tiny_model(), ours(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "adapter_config.json").read_text())
    assert data["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"
    assert ours.from_pretrained(tmp_path).r == 2


def test_a_relative_base_path_stays_readable(ours, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    tiny_model().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path / "work")
    ours(base_model_name_or_path="../base").save_pretrained("adapter")
    assert ours.from_pretrained("adapter").base_model_name_or_path == str(tmp_path / "base")


def test_the_card_says_what_the_adapter_is_and_how_to_train_it_on(ours, saved):
    path = saved / "adapter" / "README.md"
    card = ModelCard.load(path)
    assert {"hf_memeff", ours.name, "lora"} <= set(card.data.tags) and card.data.library_name == "peft"
    reader = f"{ours.config_class.__name__}.from_pretrained("
    assert "without `config=` gives plain LoRA" in card.text and reader in card.text
    config = ours.from_pretrained(saved / "adapter")
    PeftModel.from_pretrained(tiny_model(), saved / "adapter", config=config).save_pretrained(saved / "adapter")
    assert path.read_text().count(f"## Training on with {ours.config_class.title}") == 1


@needs_peft_021
def test_tensors_without_a_place_are_named_instead_of_dropped_silently(ours, saved):
    config = ours.from_pretrained(saved / "adapter")
    config.target_modules = {"q_proj"}
    with pytest.warns(UserWarning, match=r"24 of 28 tensors .* have no place in this model"):
        PeftModel.from_pretrained(tiny_model(), saved / "adapter", config=config)


# C11: files of other versions


def edit(folder, filename, **changes):
    path = folder / filename
    data = json.loads(path.read_text())
    for name, value in changes.items():
        data[name] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("empty", [None, False, "", [], {}])
def test_c11_unknown_empty_fields_are_ignored_with_one_warning_that_lists_them(ours, saved, empty, recwarn):
    edit(saved / "adapter", "adapter_config.json", future_flag=empty)
    edit(saved / "adapter", OPTIONS_NAME, future_store=empty, another=empty)
    assert ours.from_pretrained(saved / "adapter").r == 4
    (warning,) = [w for w in recwarn.list if issubclass(w.category, UserWarning) and "unknown" in str(w.message)]
    assert all(name in str(warning.message) for name in ("future_flag", "future_store", "another"))


@pytest.mark.parametrize("filename", ["adapter_config.json", OPTIONS_NAME])
@pytest.mark.parametrize("value", [True, 1, 0, 0.5, "on", ["a"], {"a": None}])
def test_c11_an_unknown_field_with_a_value_may_change_the_maths_and_is_refused(ours, saved, filename, value):
    edit(saved / "adapter", filename, future_flag=value)
    with pytest.raises(ValueError, match=rf"{filename}: got 'future_flag': .* expected .* Fix: pip install -U"):
        ours.from_pretrained(saved / "adapter")


def test_c11_missing_fields_get_their_defaults(ours, saved):
    for filename, names in (("adapter_config.json", ["use_rslora", "eva_config"]), (OPTIONS_NAME, ["tiled_loss"])):
        path = saved / "adapter" / filename
        data = {k: v for k, v in json.loads(path.read_text()).items() if k not in names}
        path.write_text(json.dumps(data))
    config = ours.from_pretrained(saved / "adapter")
    assert config.use_rslora is False and config.eva_config is None and config.tiled_loss == "auto"
    assert config.mlp_tile_tokens == 8


def test_c11_another_version_is_read(ours, saved):
    edit(saved / "adapter", OPTIONS_NAME, hf_memeff_version="9.9.9")
    edit(saved / "adapter", "adapter_config.json", peft_version="0.99.0.dev0@abcdef")
    assert ours.from_pretrained(saved / "adapter").strict is True


def test_c11_another_method_is_refused(ours, saved):
    edit(saved / "adapter", OPTIONS_NAME, method="other")
    with pytest.raises(ValueError, match=r"memeff_config.json: got method='other', expected one of 'mesp', 'sage'"):
        ours.from_pretrained(saved / "adapter")


def test_a_folder_without_an_adapter_is_refused(ours, tmp_path):
    with pytest.raises(ValueError, match=r"got no adapter_config.json in .*expected .*Fix: "):
        ours.from_pretrained(tmp_path)


# writing


def test_writing_replaces_the_file_in_one_step(tmp_path):
    """A reader that polls while the file is rewritten never meets a part of it."""
    path = tmp_path / "a.json"
    write_json(str(path), {"n": 0, "fill": "x" * 100_000})
    stop, torn = threading.Event(), []

    def poll():
        while not stop.is_set():
            try:
                json.loads(path.read_text())
            except (ValueError, FileNotFoundError) as error:
                torn.append(error)

    reader = threading.Thread(target=poll)
    reader.start()
    for n in range(50):
        write_json(str(path), {"n": n, "fill": "x" * 100_000})
    stop.set()
    reader.join()
    assert not torn and os.listdir(tmp_path) == ["a.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_json(str(path), {"n": 1})
    with pytest.raises(TypeError, match=r"got <object .* in a config, expected .* Fix: "):
        write_json(str(path), {"n": object()})
    assert json.loads(path.read_text()) == {"n": 1} and os.listdir(tmp_path) == ["a.json"]


def test_files_get_the_user_s_usual_permissions(tmp_path):
    write_json(str(tmp_path / "a.json"), {})
    (tmp_path / "b.json").write_text("{}")
    assert os.stat(tmp_path / "a.json").st_mode == os.stat(tmp_path / "b.json").st_mode


def test_saving_over_a_file_is_refused(ours, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder"):
        ours().save_pretrained(tmp_path / "file")
