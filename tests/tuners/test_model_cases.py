"""Both methods' models in PEFT's hands: cases C14, C19, C28, C30, C31 and C32."""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from helpers import (
    IDS,
    VOCAB,
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
from hf_memeff.tuners.layer import MemeffLinear

# C14: dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_c14_dtypes_of_first_and_second_adapter(ours, tmp_path, dtype, autocast):
    config = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    expected = torch.float32 if autocast else dtype
    model = get_peft_model(tiny_model(dtype=dtype), ours(**config), autocast_adapter_dtype=autocast)
    model.add_adapter("b", ours(**config), autocast_adapter_dtype=autocast)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(
        tiny_model(dtype=dtype),
        tmp_path,
        config=ours.from_pretrained(tmp_path),
        is_trainable=True,
        autocast_adapter_dtype=autocast,
    )
    again.add_adapter("b", ours(**config), autocast_adapter_dtype=autocast)
    again.load_adapter(tmp_path / "b", "b", autocast_adapter_dtype=autocast)
    for peft_model in (model, again):
        for name in ("default", "b"):
            peft_model.set_adapter(name)
            found = {p.dtype for n, p in peft_model.named_parameters() if f".{name}." in n}
            assert found == {expected}, name
            assert logits_of(peft_model).dtype == dtype
            peft_model.train()
            assert peft_model(input_ids=IDS, labels=IDS).loss.isfinite()
    layer = model.base_model.model.model.layers[0].mlp.gate_proj
    x = torch.randn(1, 3, layer.in_features, dtype=dtype, requires_grad=True)
    assert type(layer) is MemeffLinear and layer(x).dtype == layer.base_layer(x).dtype == dtype


# C19: merging


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_c19_merging_changes_nothing_and_leaves_no_trace(ours, family):
    model = adapted_model(ours, family=family)
    before = logits_of(model)
    merged = model.merge_and_unload()
    assert (logits_of(merged) - before).abs().max() <= 1e-5
    assert_untouched(merged, tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_c19_in_bfloat16_merging_moves_the_output_as_lora_s_merging_does(ours, family):
    merged = [adapted_model(cls, family, torch.bfloat16).merge_and_unload() for cls in (LoraConfig, ours)]
    assert torch.equal(logits_of(merged[0]), logits_of(merged[1]))


def test_c19_safe_merge_refuses_nan_and_keeps_the_engine(ours):
    model = adapted_model(ours)
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_and_unload(safe_merge=True)
    assert memeff_status(model).attached


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_c19_merge_adapter_and_unmerge_are_inverse(ours, family):
    """What TRL does before each generation with vLLM."""
    model = adapted_model(ours, family=family)
    before, weight = logits_of(model), next(p for n, p in model.named_parameters() if "base_layer.weight" in n)
    kept = weight.clone()
    model.merge_adapter()
    assert not torch.equal(weight, kept) and (logits_of(model) - before).abs().max() <= 1e-5
    model.unmerge_adapter()
    assert (weight - kept).abs().max() <= 1e-6 and (logits_of(model) - before).abs().max() <= 1e-5


# C28: rank and alpha by pattern


@pytest.mark.parametrize("use_rslora", [False, True])
def test_c28_scaling_and_gradients_follow_the_patterns(ours, use_rslora):
    settings = {
        "use_rslora": use_rslora,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 16, r"model\.layers\.0\.self_attn\.q_proj": 3},
    }
    models = [adapted_model(cls, **settings) for cls in (LoraConfig, ours)]
    scalings = [{n: m.scaling for n, m in model.named_modules() if isinstance(m, LoraLayer)} for model in models]
    assert scalings[0] == scalings[1] and len({s["default"] for s in scalings[1].values()}) >= 4
    (loss, gradients), (our_loss, got) = [loss_and_gradients(model, token_batch()) for model in models]
    assert abs(loss - our_loss) <= 1e-5 and worst_relative_error(got, gradients) <= 1e-5
    merged = [model.merge_and_unload() for model in models]
    assert torch.equal(logits_of(merged[0]), logits_of(merged[1]))


@needs_peft_021
@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_c28_a_pattern_that_matches_nothing_warns(ours, pattern):
    with pytest.warns(RuntimeWarning, match=rf"{pattern} keys did not match any targeted module.*typo_proj"):
        adapted_model(ours, **{pattern: {"typo_proj": 4}})


# C30: another adapter for each row


def mixed(ours):
    model = adapted_model(ours, name="a")
    model.add_adapter("b", ours(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    fill_adapters(model, seed=3)
    return model.eval()


NAMES = ["__base__", "a", "b"]


def test_c30_each_row_gets_its_adapter(ours):
    model = mixed(ours)
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
def test_c30_generation_mixes_adapters_greedily_and_with_beams(ours, beams):
    model = mixed(ours)
    ids = torch.randint(3, VOCAB, (3, 7))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    together = model.generate(input_ids=ids, adapter_names=NAMES, **settings)
    for row, name in enumerate(NAMES):
        alone = model.generate(input_ids=ids[row : row + 1], adapter_names=[name], **settings)
        assert torch.equal(together[row], alone[0]), name


def test_c30_unknown_names_and_training_are_refused(ours):
    model = mixed(ours)
    with pytest.raises(ValueError, match=r"non-existing adapter.*: c"):
        model(input_ids=IDS, adapter_names=["c"])
    with pytest.raises(ValueError, match="training mode"):
        model.train()(input_ids=IDS, adapter_names=["a"])


# C31: reference adapters


def test_c31_a_reference_adapter_copied_by_name_gives_equal_logits(ours):
    """TRL clones the trained adapter: add_adapter("ref", config), then it copies what has ".default." in its name."""
    model = adapted_model(ours)
    before = logits_of(model)
    model.add_adapter("ref", model.peft_config["default"])
    parameters = dict(model.named_parameters())
    trained = [name for name in parameters if "lora_" in name and ".ref." not in name]
    assert trained and all(".default." in name for name in trained)
    for name in trained:
        parameters[name.replace(".default.", ".ref.")].data.copy_(parameters[name].data)
    model.set_adapter("ref")
    assert torch.equal(logits_of(model), before)
    model.set_adapter("default")
    loss, _ = loss_and_gradients(model, token_batch())
    assert abs(loss - loss_and_gradients(adapted_model(ours), token_batch())[0]) <= 1e-6


def test_c31_a_reference_pass_without_gradients_stores_nothing(ours):
    model = adapted_model(ours).train()
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, torch.no_grad():
        model(input_ids=IDS, labels=IDS)
    assert not packed


def test_a_second_adapter_with_other_options_brings_them_when_it_is_active(ours):
    model = adapted_model(ours)
    model.add_adapter("b", ours(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", tiled_loss="never"))
    assert memeff_status(model).tiled_loss.path == "tiled"
    model.set_adapter("b")
    assert memeff_status(model).tiled_loss.path == "logits"
    model.set_adapter("default")
    assert memeff_status(model).tiled_loss.path == "tiled"


# C32: experts are parameters

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERT_SETTINGS = [
    {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS},
    {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
]


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
@pytest.mark.parametrize("settings", EXPERT_SETTINGS, ids=["parameters", "names_of_transformers_4"])
def test_c32_experts_are_adapted_trained_and_saved_as_by_lora(ours, tmp_path, settings):
    models = [adapted_model(cls, "qwen3_moe", **copy.deepcopy(settings)) for cls in (LoraConfig, ours)]
    (loss, gradients), (our_loss, got) = [loss_and_gradients(model, token_batch()) for model in models]
    assert any("experts" in name for name in gradients)
    assert abs(loss - our_loss) <= 1e-5 and worst_relative_error(got, gradients) <= 1e-5
    models[1].save_pretrained(tmp_path)
    before = logits_of(models[1])
    config = ours.from_pretrained(tmp_path)
    for again in (
        PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path),
        PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path, config=config, is_trainable=True),
    ):
        assert torch.equal(logits_of(again), before)


def test_c32_experts_without_adapters_are_named(ours):
    with pytest.warns(UserWarning, match=r"4 expert parameters, such as .*target_parameters, such as 'experts\."):
        adapted_model(ours, family="qwen3_moe", target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapted_model(ours, family="qwen3_moe", target_modules=["q_proj"], target_parameters=EXPERTS)
        adapted_model(ours, family="llama", target_modules=["q_proj"])


@needs_peft_021
def test_an_adapter_saved_under_transformers_4_finds_the_fused_experts(ours, tmp_path):
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
    config = ours.from_pretrained(tmp_path, **ours.exact)
    again = PeftModel.from_pretrained(tiny_model("mixtral"), tmp_path, config=config)
    assert torch.equal(logits_of(again), logits_of(stock))
    assert not torch.equal(logits_of(again), logits_of(tiny_model("mixtral")))


def test_arrow_routes_as_in_lora(ours):
    results = []
    for config_cls in (LoraConfig, ours):
        settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        model = get_peft_model(tiny_model(), config_cls(**settings), adapter_name="task_0")
        model.add_adapter("task_1", config_cls(**settings))
        fill_adapters(model)
        arrow = lora.ArrowConfig(top_k=1, rng_seed=0)
        arrow.task_adapter_names = ["task_0", "task_1"]
        model.add_adapter("arrow_router", config_cls(**settings, arrow_config=arrow))
        model.set_adapter("arrow_router")
        results.append(logits_of(model))
    assert torch.equal(*results) and not torch.equal(results[1], logits_of(tiny_model()))


def test_tied_embeddings_stay_tied_when_the_engine_meets_them(ours):
    results = []
    for config_cls in (LoraConfig, ours):
        base = tiny_model(tie_word_embeddings=True)
        settings = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
        model = get_peft_model(base, config_cls(r=4, task_type="CAUSAL_LM", **settings))
        fill_adapters(model)
        assert base.lm_head.base_layer.weight is base.model.embed_tokens.base_layer.weight
        results.append(loss_and_gradients(model, token_batch()))
    assert abs(results[0][0] - results[1][0]) <= 1e-5
    assert worst_relative_error(results[1][1], results[0][1]) <= 1e-5
