"""MespModel in PEFT's hands: adapters, dtypes, merging, mixed batches, and undoing."""

import copy
import gc
import io
import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from helpers import (
    VOCAB,
    fill_adapters,
    loss_and_gradients,
    needs_peft_021,
    tiny_model,
    token_batch,
    worst_relative_error,
)
from hf_memeff import MespConfig, memeff_status
from hf_memeff.blocks.attach import is_attached
from hf_memeff.tuners.mesp import MespLinear, MespModel

IDS = torch.arange(3, 24).view(1, -1)
TARGETS = {"llama": "all-linear", "qwen2": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"]}


def wrap(config_cls=MespConfig, family="llama", dtype=torch.float32, name="default", **settings):
    """A tiny model with a filled adapter; the same adapter values for both config classes."""
    settings = {"r": 4, "target_modules": TARGETS.get(family, "all-linear"), "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(tiny_model(family, dtype=dtype), config_cls(**settings), adapter_name=name)
    fill_adapters(model)
    return model


def logits(model, **kwargs):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **kwargs).logits


def test_it_is_lora_s_model_with_the_engine_on():
    model = wrap()
    assert type(model.base_model) is MespModel and isinstance(model, PeftModel)
    status = memeff_status(model)
    assert status.attached and {b.path for b in status.blocks} == {"structured"}
    assert torch.equal(logits(model), logits(wrap(LoraConfig)))


def test_only_the_adapter_is_trained():
    names = {name for name, parameter in wrap().named_parameters() if parameter.requires_grad}
    assert names == {name for name, parameter in wrap(LoraConfig).named_parameters() if parameter.requires_grad}


# C14: dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_c14_dtypes_of_first_and_second_adapter(tmp_path, dtype, autocast):
    config = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    expected = torch.float32 if autocast else dtype
    model = get_peft_model(tiny_model(dtype=dtype), MespConfig(**config), autocast_adapter_dtype=autocast)
    model.add_adapter("b", MespConfig(**config), autocast_adapter_dtype=autocast)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(
        tiny_model(dtype=dtype),
        tmp_path,
        config=MespConfig.from_pretrained(tmp_path),
        is_trainable=True,
        autocast_adapter_dtype=autocast,
    )
    again.add_adapter("b", MespConfig(**config), autocast_adapter_dtype=autocast)
    again.load_adapter(tmp_path / "b", "b", autocast_adapter_dtype=autocast)
    for peft_model in (model, again):
        for name in ("default", "b"):
            peft_model.set_adapter(name)
            found = {p.dtype for n, p in peft_model.named_parameters() if f".{name}." in n}
            assert found == {expected}, name
            assert logits(peft_model).dtype == dtype
            peft_model.train()
            assert peft_model(input_ids=IDS, labels=IDS).loss.isfinite()
    layer = model.base_model.model.model.layers[0].mlp.gate_proj
    x = torch.randn(1, 3, layer.in_features, dtype=dtype, requires_grad=True)
    assert type(layer) is MespLinear and layer(x).dtype == layer.base_layer(x).dtype == dtype


# C19: merging


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_c19_merging_changes_nothing_and_leaves_no_trace(family):
    model = wrap(family=family)
    before = logits(model)
    merged = model.merge_and_unload()
    assert (logits(merged) - before).abs().max() <= 1e-5
    assert_untouched(merged, tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_c19_in_bfloat16_merging_moves_the_output_as_lora_s_merging_does(family):
    merged = [wrap(cls, family, torch.bfloat16).merge_and_unload() for cls in (LoraConfig, MespConfig)]
    assert torch.equal(logits(merged[0]), logits(merged[1]))


def test_c19_safe_merge_refuses_nan_and_keeps_the_engine():
    model = wrap()
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_and_unload(safe_merge=True)
    assert memeff_status(model).attached


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_c19_merge_adapter_and_unmerge_are_inverse(family):
    """What TRL does before each generation with vLLM."""
    model = wrap(family=family)
    before, weight = logits(model), next(p for n, p in model.named_parameters() if "base_layer.weight" in n)
    kept = weight.clone()
    model.merge_adapter()
    assert not torch.equal(weight, kept) and (logits(model) - before).abs().max() <= 1e-5
    model.unmerge_adapter()
    assert (weight - kept).abs().max() <= 1e-6 and (logits(model) - before).abs().max() <= 1e-5


def assert_untouched(model: nn.Module, fresh: nn.Module) -> None:
    """Same classes, instance attributes, hooks, keys and tags as a model that never met PEFT."""
    assert not is_attached(model)
    assert list(model.state_dict()) == list(fresh.state_dict())
    assert getattr(model, "model_tags", None) == fresh.model_tags
    for (name, module), (_, other) in zip(model.named_modules(), fresh.named_modules(), strict=True):
        assert type(module) is type(other), name
        assert set(module.__dict__) - {"peft_config"} == set(other.__dict__), name
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
            assert not getattr(module, hooks), (name, hooks)


def test_unload_gives_the_base_model_back():
    model = wrap()
    base = model.unload()
    fresh = tiny_model()
    assert_untouched(base, fresh)
    assert torch.equal(logits(base), logits(fresh))


def test_a_model_s_own_tags_survive():
    base = tiny_model()
    base.add_model_tags(["mine", "lora"])
    model = get_peft_model(base, MespConfig(target_modules=["q_proj"]))
    assert base.model_tags == ["mine", "lora", "hf_memeff", "mesp"]
    model.unload()
    assert base.model_tags == ["mine", "lora"]


def test_deleting_adapters_follows_lora_and_the_last_one_takes_the_engine_off():
    model = wrap()
    model.add_adapter("b", MespConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="was active which is now deleted"):
        model.delete_adapter("default")
    assert model.active_adapter == "b" and memeff_status(model).attached
    assert not any(".default." in name for name in model.state_dict())
    model.delete_adapter("b")
    assert not is_attached(model.base_model.model)
    assert torch.equal(logits(model.base_model.model), logits(tiny_model()))


def test_disabled_adapters_give_the_base_model():
    model = wrap(modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(tiny_model()))


def test_copies_train_their_own_weights():
    """A deepcopy, an unpickled copy and the original stay apart."""
    model = wrap()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        fill_adapters(twin, seed=2)
        other = wrap()
        fill_adapters(other, seed=2)
        loss, gradients = loss_and_gradients(twin, token_batch())
        expected_loss, expected = loss_and_gradients(other, token_batch())
        assert abs(loss - expected_loss) <= 1e-6 and worst_relative_error(gradients, expected) <= 1e-6
        assert memeff_status(twin).attached


# C28: rank and alpha by pattern


@pytest.mark.parametrize("use_rslora", [False, True])
def test_c28_scaling_and_gradients_follow_the_patterns(use_rslora):
    settings = {
        "use_rslora": use_rslora,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 16, r"model\.layers\.0\.self_attn\.q_proj": 3},
    }
    models = [wrap(cls, **settings) for cls in (LoraConfig, MespConfig)]
    scalings = [{n: m.scaling for n, m in model.named_modules() if isinstance(m, LoraLayer)} for model in models]
    assert scalings[0] == scalings[1] and len({s["default"] for s in scalings[1].values()}) >= 4
    (loss, gradients), (our_loss, ours) = [loss_and_gradients(model, token_batch()) for model in models]
    assert abs(loss - our_loss) <= 1e-5 and worst_relative_error(ours, gradients) <= 1e-5
    merged = [model.merge_and_unload() for model in models]
    assert torch.equal(logits(merged[0]), logits(merged[1]))


@needs_peft_021
@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_c28_a_pattern_that_matches_nothing_warns(pattern):
    with pytest.warns(RuntimeWarning, match=rf"{pattern} keys did not match any targeted module.*typo_proj"):
        wrap(**{pattern: {"typo_proj": 4}})


# C30: another adapter for each row


def mixed():
    model = wrap(name="a")
    model.add_adapter("b", MespConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    fill_adapters(model, seed=3)
    return model.eval()


NAMES = ["__base__", "a", "b"]


def test_c30_each_row_gets_its_adapter():
    model = mixed()
    ids = torch.randint(3, VOCAB, (3, 12))
    with torch.no_grad():
        together = model(input_ids=ids, adapter_names=NAMES).logits
        for row, name in enumerate(NAMES):
            if name == "__base__":
                with model.disable_adapter():
                    alone = model(input_ids=ids[row : row + 1]).logits
            else:
                model.set_adapter(name)
                alone = model(input_ids=ids[row : row + 1]).logits
            assert (together[row] - alone[0]).abs().max() <= 1e-5, name


@pytest.mark.parametrize("beams", [1, 2])
def test_c30_generation_mixes_adapters_greedily_and_with_beams(beams):
    model = mixed()
    ids = torch.randint(3, VOCAB, (3, 7))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    together = model.generate(input_ids=ids, adapter_names=NAMES, **settings)
    for row, name in enumerate(NAMES):
        alone = model.generate(input_ids=ids[row : row + 1], adapter_names=[name], **settings)
        assert torch.equal(together[row], alone[0]), name


def test_c30_unknown_names_and_training_are_refused():
    model = mixed()
    with pytest.raises(ValueError, match=r"non-existing adapter.*: c"):
        model(input_ids=IDS, adapter_names=["c"])
    with pytest.raises(ValueError, match="training mode"):
        model.train()(input_ids=IDS, adapter_names=["a"])


# C31: reference adapters


def test_c31_a_reference_adapter_copied_by_name_gives_equal_logits():
    """TRL clones the trained adapter: add_adapter("ref", config), then it copies what has ".default." in its name."""
    model = wrap()
    before = logits(model)
    model.add_adapter("ref", model.peft_config["default"])
    parameters = dict(model.named_parameters())
    ours = [name for name in parameters if "lora_" in name and ".ref." not in name]
    assert ours and all(".default." in name for name in ours)
    for name in ours:
        parameters[name.replace(".default.", ".ref.")].data.copy_(parameters[name].data)
    model.set_adapter("ref")
    assert torch.equal(logits(model), before)
    model.set_adapter("default")
    loss, _ = loss_and_gradients(model, token_batch())
    assert abs(loss - loss_and_gradients(wrap(), token_batch())[0]) <= 1e-6


def test_c31_a_reference_pass_without_gradients_stores_nothing():
    model = wrap().train()
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, torch.no_grad():
        model(input_ids=IDS, labels=IDS)
    assert not packed


def test_a_second_adapter_with_other_options_brings_them_when_it_is_active():
    model = wrap()
    model.add_adapter("b", MespConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", tiled_loss="never"))
    assert memeff_status(model).tiled_loss.path == "tiled"
    model.set_adapter("b")
    assert memeff_status(model).tiled_loss.path == "logits"
    model.set_adapter("default")
    assert memeff_status(model).tiled_loss.path == "tiled"


# refusing before the model is changed

COLLIDING = ("", "a.b", "a/b", "lora_", "lora_A", "base_layer", "__base__", "modules_to_save")
COLLIDING += ("model", "layers", "0", "q_proj", "weight", "keys", "training")


@pytest.mark.parametrize("name", COLLIDING)
def test_adapter_names_that_collide_with_key_parts_are_refused(name):
    base = tiny_model()
    config = MespConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"got the adapter name .*, expected a name .* Fix: choose another"):
        get_peft_model(base, config, adapter_name=name)
    assert_untouched(base, tiny_model())
    model = get_peft_model(base, config)
    with pytest.raises(ValueError, match="got the adapter name"):
        model.add_adapter(name, copy.copy(config))
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("name", ["default", "a", "b", "ref", "r", "lora", "policy_2", "x-1"])
def test_other_names_save_and_load(tmp_path, name):
    model = wrap(name=name)
    other = "other"
    model.add_adapter(other, MespConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    fill_adapters(model)
    before = logits(model)
    model.save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    config = MespConfig.from_pretrained(folder)
    again = PeftModel.from_pretrained(tiny_model(), folder, adapter_name=name, config=config)
    assert torch.equal(logits(again), before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_base_dtype_that_cannot_train_is_refused(dtype):
    base = tiny_model()
    projection = base.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=r"got weights of dtype .* in 'model.layers.1.mlp.up_proj'.*expected.*Fix: "):
        get_peft_model(base, MespConfig(target_modules=["q_proj"]))
    assert not any(isinstance(module, LoraLayer) for module in base.modules())


def test_targets_that_match_nothing_get_peft_s_own_error():
    errors = []
    for config_cls in (LoraConfig, MespConfig):
        with pytest.raises(ValueError) as error:
            get_peft_model(tiny_model(), config_cls(target_modules=["nothing_like_this"]))
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "not found in the base model" in errors[1]


def test_an_unusable_store_folder_is_refused_before_the_model_is_changed(tmp_path):
    (tmp_path / "file").write_text("")
    base = tiny_model()
    config = MespConfig(target_modules=["q_proj"], activation_store="disk", activation_store_dir=tmp_path / "file")
    with pytest.raises(OSError, match=r"got .*expected .*Fix: "):
        get_peft_model(base, config)
    assert_untouched(base, tiny_model())


class OddLinear(nn.Linear):
    """A linear layer of an unknown class."""

    def forward(self, x):
        return super().forward(x) * 1.5


def odd_model():
    """A model in which one block has no known structure: its norm is of an unknown kind."""
    base = tiny_model()
    base.model.layers[1].input_layernorm = nn.Sequential(base.model.layers[1].input_layernorm, nn.Tanh())
    return base


def test_strict_refuses_a_fallback_and_takes_the_adapter_back():
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    assert [b.path for b in memeff_status(get_peft_model(odd_model(), MespConfig(**config))).blocks] == [
        "structured",
        "recompute",
    ]
    base = odd_model()
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        get_peft_model(base, MespConfig(**config, strict=True))
    assert_untouched(base, odd_model())
    model = get_peft_model(base, MespConfig(**config))
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        model.add_adapter("b", MespConfig(**config, strict=True))
        model.set_adapter("b")


def test_tiled_loss_always_on_a_model_without_a_causal_head_is_refused():
    with pytest.raises(ValueError, match=r"always.*expected a causal language model"):
        get_peft_model(tiny_model().model, MespConfig(target_modules=["q_proj"], tiled_loss="always"))


# PEFT features that look at the adapter's type


def test_injecting_into_a_model_attaches_too():
    model = inject_adapter_in_model(MespConfig(r=4, target_modules=["q_proj"]), tiny_model())
    assert memeff_status(model).attached
    fill_adapters(model)
    loss, gradients = loss_and_gradients(model, token_batch())
    stock = inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"]), tiny_model())
    fill_adapters(stock)
    stock_loss, expected = loss_and_gradients(stock, token_batch())
    assert abs(loss - stock_loss) <= 1e-5 and worst_relative_error(gradients, expected) <= 1e-5


@needs_peft_021
def test_a_pissa_adapter_converts_to_lora(tmp_path):
    """PEFT's path_initial_model_for_weight_conversion: the result fits the unchanged base model."""
    model = get_peft_model(
        tiny_model(), MespConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    )
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    trained = logits(model)
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    assert list(model.peft_config) == ["default"]
    again = PeftModel.from_pretrained(tiny_model(), tmp_path / "converted")
    assert (logits(again) - trained).abs().max() <= 1e-4


def test_add_weighted_adapter_works():
    results = []
    for config_cls in (LoraConfig, MespConfig):
        model = wrap(config_cls, name="a")
        model.add_adapter("b", config_cls(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        fill_adapters(model)
        model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "mix", combination_type="linear")
        model.set_adapter("mix")
        results.append(logits(model))
    assert torch.equal(*results)


# C32: experts are parameters

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERT_SETTINGS = [
    {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS},
    {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
]


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
@pytest.mark.parametrize("settings", EXPERT_SETTINGS, ids=["parameters", "names_of_transformers_4"])
def test_c32_experts_are_adapted_trained_and_saved_as_by_lora(tmp_path, settings):
    models = [wrap(cls, "qwen3_moe", **copy.deepcopy(settings)) for cls in (LoraConfig, MespConfig)]
    (loss, gradients), (our_loss, ours) = [loss_and_gradients(model, token_batch()) for model in models]
    assert any("experts" in name for name in gradients)
    assert abs(loss - our_loss) <= 1e-5 and worst_relative_error(ours, gradients) <= 1e-5
    models[1].save_pretrained(tmp_path)
    before = logits(models[1])
    config = MespConfig.from_pretrained(tmp_path)
    for again in (
        PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path),
        PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path, config=config, is_trainable=True),
    ):
        assert torch.equal(logits(again), before)


def test_c32_experts_without_adapters_are_named():
    with pytest.warns(UserWarning, match=r"4 expert parameters, such as .*target_parameters, such as 'experts\."):
        wrap(family="qwen3_moe", target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        wrap(family="qwen3_moe", target_modules=["q_proj"], target_parameters=EXPERTS)
        wrap(family="llama", target_modules=["q_proj"])


def test_an_adapter_saved_under_transformers_4_finds_the_fused_experts(tmp_path):
    """Mixtral's experts were modules w1, w2, w3 then; PEFT fits names and tensors to the fused parameters."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "w1", "w2", "w3"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        parts = {"self_attn.q_proj": (64, 64)}
        for expert in range(4):
            name = f"block_sparse_moe.experts.{expert}"
            parts |= {f"{name}.w1": (64, 112), f"{name}.w3": (64, 112), f"{name}.w2": (112, 64)}
        for name, (inputs, outputs) in parts.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    stock = PeftModel.from_pretrained(tiny_model("mixtral"), tmp_path)
    ours = PeftModel.from_pretrained(tiny_model("mixtral"), tmp_path, config=MespConfig.from_pretrained(tmp_path))
    assert torch.equal(logits(ours), logits(stock))
    assert not torch.equal(logits(ours), logits(tiny_model("mixtral")))


def test_arrow_routes_as_in_lora():
    results = []
    for config_cls in (LoraConfig, MespConfig):
        settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        model = get_peft_model(tiny_model(), config_cls(**settings), adapter_name="task_0")
        model.add_adapter("task_1", config_cls(**settings))
        fill_adapters(model)
        arrow = lora.ArrowConfig(top_k=1, rng_seed=0)
        arrow.task_adapter_names = ["task_0", "task_1"]
        model.add_adapter("arrow_router", config_cls(**settings, arrow_config=arrow))
        model.set_adapter("arrow_router")
        results.append(logits(model))
    assert torch.equal(*results) and not torch.equal(results[1], logits(tiny_model()))


def test_tied_embeddings_stay_tied_when_the_engine_meets_them():
    results = []
    for config_cls in (LoraConfig, MespConfig):
        base = tiny_model(tie_word_embeddings=True)
        settings = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
        model = get_peft_model(base, config_cls(r=4, task_type="CAUSAL_LM", **settings))
        fill_adapters(model)
        assert base.lm_head.base_layer.weight is base.model.embed_tokens.base_layer.weight
        results.append(loss_and_gradients(model, token_batch()))
    assert abs(results[0][0] - results[1][0]) <= 1e-5
    assert worst_relative_error(results[1][1], results[0][1]) <= 1e-5


def test_unloading_frees_the_adapters():
    import weakref

    model = wrap()
    layer = weakref.ref(model.base_model.model.model.layers[0].mlp.gate_proj)
    base = model.unload()
    del model
    gc.collect()
    assert layer() is None and base is not None


def test_layers_outside_blocks_keep_only_their_input():
    assert type(wrap().base_model.model.model.layers[0].mlp.gate_proj) is MespLinear
    model = wrap(target_modules=["lm_head"])
    assert type(model.base_model.model.lm_head) is MespLinear
    model.base_model.detach_engine()
    assert type(model.base_model.model.lm_head) is lora.Linear
