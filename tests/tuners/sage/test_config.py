"""SageConfig: what it refuses, what it tells the engine, and how it reads files of either method."""

import copy
import dataclasses
import pickle
import warnings

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import PeftType

from helpers import adapted_model, tiny_model
from hf_memeff import MespConfig, SageConfig, memeff_status
from hf_memeff.blocks.options import EngineOptions, SalientTokens

NAN, INFINITE = float("nan"), float("inf")

WRONG = [
    ("saliency", "attentions"),
    ("saliency", None),
    ("saliency", 1),
    ("token_budget", 0),
    ("token_budget", 0.0),
    ("token_budget", -0.5),
    ("token_budget", 1.01),
    ("token_budget", 2),
    ("token_budget", NAN),
    ("token_budget", INFINITE),
    ("token_budget", True),
    ("token_budget", None),
    ("token_budget", "half"),
    ("token_budget", "0.5"),
    ("token_budget", [0.5]),
    ("attention_mass", 0),
    ("attention_mass", 1.5),
    ("attention_mass", NAN),
    ("attention_mass", True),
    ("attention_mass", "0.8"),
    ("min_tokens", 0),
    ("min_tokens", -8),
    ("min_tokens", 8.0),
    ("min_tokens", True),
    ("min_tokens", 2**31),
    ("sink_tokens", -1),
    ("sink_tokens", 4.0),
    ("sink_tokens", False),
    ("sink_tokens", 2**31),
    ("keep_last", 1),
    ("keep_last", "yes"),
    ("dense_layers", -1),
    ("dense_layers", "-1"),
    ("dense_layers", (0, 0)),
    ("dense_layers", [1, -1, 1]),
    ("dense_layers", (0.0,)),
    ("dense_layers", (True,)),
    ("dense_layers", {0}),
    ("dense_layers", None),
    ("dense_layers", (2**31,)),
    ("backward_keys", "none"),
    ("backward_keys", True),
    ("query_rows", 0),
    ("query_rows", -4),
    ("query_rows", 4.0),
    ("query_rows", True),
    ("query_rows", "first"),
    ("query_rows", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_got_expected_and_fix(name, value):
    with pytest.raises(ValueError, match=rf"SageConfig got {name}=.*, expected .*\. Fix: "):
        SageConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_broken_later_is_refused_before_the_engine_gets_it(name, value):
    config = SageConfig()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf"SageConfig got {name}="):
        config.validate()


def test_an_adaptive_budget_of_random_scores_is_refused():
    with pytest.raises(ValueError, match=r"got token_budget='adaptive' with saliency='random', expected a number.*Fix"):
        SageConfig(token_budget="adaptive", saliency="random")


def test_defaults_are_the_engine_s():
    assert SageConfig().engine_options() == EngineOptions(salient=SalientTokens())


def test_every_field_of_the_engine_s_has_a_config_field_with_help_that_names_what_can_be_chosen():
    own = {item.name: item for item in dataclasses.fields(SageConfig)}
    for item in dataclasses.fields(SalientTokens):
        assert len(own[item.name].metadata["help"]) > 80, item.name
        if item.name != "backward_keys":  # None, which follows the saliency
            assert getattr(SageConfig(), item.name) == item.default, item.name
    for name, choices in {
        "saliency": ("attention", "gradient", "value_norm", "random"),
        "token_budget": ("adaptive",),
        "backward_keys": ("kept", "all"),
        "query_rows": ("labels", "last"),
    }.items():
        assert all(repr(choice) in own[name].metadata["help"] for choice in choices), name


SET = {
    "saliency": "gradient",
    "token_budget": "adaptive",
    "attention_mass": 0.6,
    "min_tokens": 3,
    "sink_tokens": 0,
    "keep_last": False,
    "dense_layers": (0, -2),
    "backward_keys": "all",
}


def test_set_fields_reach_the_engine():
    options = SageConfig(**SET, tiled_loss="never", mlp_tile_tokens=8).engine_options()
    assert options == EngineOptions(salient=SalientTokens(**SET), tiled_loss="never", mlp_tile_tokens=8)
    assert SageConfig(query_rows=16).engine_options().salient.query_rows == 16


@pytest.mark.parametrize("saliency", ["attention", "value_norm", "random", "gradient"])
def test_where_all_keys_cost_no_memory_they_are_the_default(saliency):
    def keys_of(config):
        return config.engine_options().salient.backward_keys

    assert keys_of(SageConfig(saliency=saliency)) == ("all" if saliency == "gradient" else "kept")
    for keys in ("kept", "all"):
        assert keys_of(SageConfig(saliency=saliency, backward_keys=keys)) == keys
    other = dataclasses.replace(SageConfig(saliency="gradient"), saliency=saliency)
    assert keys_of(other) == keys_of(SageConfig(saliency=saliency))


def test_another_saliency_than_the_file_s_has_its_own_default_of_keys(tmp_path):
    """Trained by the gradient, trained on by attention: all keys would be three times the memory that was asked for."""
    SageConfig(r=3, saliency="gradient").save_pretrained(tmp_path)
    assert SageConfig.from_pretrained(tmp_path).engine_options().salient.backward_keys == "all"
    config = SageConfig.from_pretrained(tmp_path, saliency="attention")
    assert config.engine_options().salient.backward_keys == "kept"


def test_lists_of_layers_become_tuples():
    assert SageConfig(dense_layers=[0, -1]).dense_layers == (0, -1)
    config = SageConfig()
    config.dense_layers = [0]
    assert config.engine_options().salient.dense_layers == (0,)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"attention_mass": 0.5}, ["attention_mass"]),
        ({"min_tokens": 2, "attention_mass": 0.5}, ["attention_mass", "min_tokens"]),
        ({"query_rows": "last", "saliency": "gradient"}, ["query_rows"]),
        ({"query_rows": 8, "saliency": "value_norm"}, ["query_rows"]),
        ({"query_rows": 8}, []),
        ({"attention_mass": 0.5, "min_tokens": 2, "token_budget": "adaptive"}, []),
    ],
)
def test_fields_that_the_others_leave_without_effect_are_named(settings, idle):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SageConfig(**settings)
    assert [str(w.message).split("got ")[1].split("=")[0] for w in caught] == idle
    assert all("no effect" in str(w.message) and "Fix: " in str(w.message) for w in caught)


def test_it_is_a_lora_config_of_its_own_type():
    config = SageConfig(r=4, target_modules=["q_proj"], token_budget=0.25)
    assert isinstance(config, LoraConfig) and config.peft_type is PeftType.SAGE and not config.is_prompt_learning
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), dataclasses.replace(config)):
        assert again == config and type(again) is SageConfig
    stock = [item.name for item in dataclasses.fields(LoraConfig)]
    assert [item.name for item in dataclasses.fields(SageConfig)][: len(stock)] == stock


# files of either method


def test_round_trip_keeps_every_field(tmp_path):
    config = SageConfig(r=5, target_modules=["q_proj"], mlp_tile_tokens=32, **SET)
    config.save_pretrained(tmp_path)
    again = SageConfig.from_pretrained(tmp_path)
    assert type(again) is SageConfig and again.to_dict() == config.to_dict()


def test_an_adapter_of_mesp_is_trained_on_with_sage_and_the_other_way_round(tmp_path):
    """The files of both are LoRA's; the class that is asked says how to go on, and shared options are kept."""
    MespConfig(r=3, target_modules=["q_proj"], tiled_loss="never", mlp_tile_tokens=8).save_pretrained(tmp_path / "mesp")
    config = SageConfig.from_pretrained(tmp_path / "mesp")
    assert config == SageConfig(r=3, target_modules=["q_proj"], tiled_loss="never", mlp_tile_tokens=8)
    SageConfig(r=3, target_modules=["q_proj"], tiled_loss="never", token_budget=0.25).save_pretrained(tmp_path / "sage")
    assert MespConfig.from_pretrained(tmp_path / "sage") == MespConfig(
        r=3, target_modules=["q_proj"], tiled_loss="never"
    )


def test_options_given_in_code_come_before_the_file_s(tmp_path):
    SageConfig(r=3, token_budget=0.25, sink_tokens=2).save_pretrained(tmp_path)
    config = SageConfig.from_pretrained(tmp_path, token_budget=0.75, dense_layers=())
    assert (config.r, config.token_budget, config.sink_tokens, config.dense_layers) == (3, 0.75, 2, ())
    store = SageConfig.from_pretrained(tmp_path, activation_store="disk", activation_store_dir=str(tmp_path))
    assert store.activation_store_dir == str(tmp_path)
    with pytest.raises(ValueError, match="SageConfig got token_budget=0"):
        SageConfig.from_pretrained(tmp_path, token_budget=0)


def test_the_loaded_model_trains_with_the_method_whose_config_is_passed(tmp_path):
    adapted_model(MespConfig).save_pretrained(tmp_path)
    config = SageConfig.from_pretrained(tmp_path, token_budget=0.25)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path, config=config, is_trainable=True)
    assert model.peft_type == PeftType.SAGE
    assert "SageConfig.from_pretrained(folder) to train it on with SAGE" in memeff_status(model).notes[-1]


def test_saving_again_with_another_method_rewrites_options_and_card(tmp_path):
    adapted_model(MespConfig).save_pretrained(tmp_path)
    config = SageConfig.from_pretrained(tmp_path, token_budget=0.25)
    PeftModel.from_pretrained(tiny_model(), tmp_path, config=config, is_trainable=True).save_pretrained(tmp_path)
    assert SageConfig.from_pretrained(tmp_path).token_budget == 0.25
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Training on with") == 1 and "SageConfig.from_pretrained(adapter)" in card
    assert "MespConfig" not in card


def test_dense_layers_are_the_model_s():
    settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    base = tiny_model()
    with pytest.raises(ValueError, match=r"dense_layers"):
        get_peft_model(base, SageConfig(dense_layers=(2,), **settings))
    model = get_peft_model(base, SageConfig(dense_layers=(-2, 1), **settings))
    assert memeff_status(model).attached
