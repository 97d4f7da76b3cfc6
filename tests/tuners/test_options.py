import dataclasses

import pytest

from hf_memeff import MespConfig
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.tuners.options import MemeffOptions

WRONG = [
    ("activation_store", "ram"),
    ("activation_store", None),
    ("activation_store", ["disk"]),
    ("tiled_loss", True),
    ("tiled_loss", "Auto"),
    ("loss_tile_bytes", 0),
    ("loss_tile_bytes", -1),
    ("loss_tile_bytes", 2.5),
    ("loss_tile_bytes", True),
    ("loss_tile_bytes", 2**41),
    ("mlp_tile_tokens", 0),
    ("mlp_tile_tokens", "128"),
    ("mlp_tile_tokens", 2**25),
    ("strict", 1),
    ("strict", "yes"),
    ("activation_store_dir", ""),
    ("activation_store_dir", 3),
    ("activation_store_dir", "a\0b"),
]


def test_fields_are_the_engine_s_with_the_engine_s_defaults():
    assert (*MemeffOptions.option_rules(), "salient") == tuple(item.name for item in dataclasses.fields(EngineOptions))
    assert MemeffOptions().engine_options() == EngineOptions()


def test_every_field_has_help_that_names_what_can_be_chosen():
    for item in dataclasses.fields(MemeffOptions):
        assert len(item.metadata["help"]) > 80, item.name
    helps = {item.name: item.metadata["help"] for item in dataclasses.fields(MemeffOptions)}
    assert all(choice in helps["activation_store"] for choice in ("memory", "cpu", "disk"))
    assert all(choice in helps["tiled_loss"] for choice in ("auto", "always", "never"))


def test_set_fields_reach_the_engine():
    values = {
        "activation_store": "disk",
        "activation_store_dir": "/somewhere",
        "tiled_loss": "always",
        "loss_tile_bytes": 4096,
        "mlp_tile_tokens": 64,
        "strict": True,
    }
    assert MespConfig(**values).engine_options() == EngineOptions(**values)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_got_expected_and_fix(name, value):
    store = {"activation_store": "disk"} if name == "activation_store_dir" else {}
    with pytest.raises(ValueError, match=rf"MespConfig got {name}=.*, expected .*\. Fix: "):
        MespConfig(**store, **{name: value})


def test_a_long_wrong_value_does_not_fill_the_message():
    with pytest.raises(ValueError) as error:
        MespConfig(tiled_loss="x" * 10_000)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("store", ["memory", "cpu"])
def test_a_folder_without_the_disk_store_is_refused(store):
    with pytest.raises(ValueError, match=r"activation_store_dir='/a'.*expected None.*Fix: set activation_store='disk'"):
        MespConfig(activation_store=store, activation_store_dir="/a")


def test_a_path_object_is_taken(tmp_path):
    config = MespConfig(activation_store="disk", activation_store_dir=tmp_path)
    assert config.engine_options().activation_store_dir == str(tmp_path)
