import copy
import json
import pickle

import pytest
from peft import PeftType
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_MIXED_MODEL_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)

from hf_memeff.tuners.registry import add_peft_type, register_tuner


def test_member_behaves_like_peft_s_own(ours):
    name = ours.name.upper()
    member = getattr(PeftType, name)
    assert PeftType(name) is member and PeftType[name] is member
    assert member in PeftType and member in list(PeftType) and PeftType.__members__[name] is member
    assert isinstance(member, PeftType) and member == name and member.value == name and member.name == name
    assert pickle.loads(pickle.dumps(member)) is member and copy.deepcopy(member) is member
    assert json.dumps(member) == f'"{name}"' and repr(member) == f"<PeftType.{name}: '{name}'>"
    assert hash(member) == hash(name)


def test_adding_a_member_twice_changes_nothing():
    before = list(PeftType)
    assert add_peft_type("MESP") is PeftType.MESP
    assert list(PeftType) == before
    assert add_peft_type("LORA") is PeftType.LORA and PeftType.LORA.value == "LORA"


def test_tuner_is_registered_with_lora_s_prefix_and_not_for_mixed_models(ours):
    assert PEFT_TYPE_TO_CONFIG_MAPPING[ours.peft_type] is ours.config_class
    assert PEFT_TYPE_TO_TUNER_MAPPING[ours.peft_type] is ours.model_class
    assert PEFT_TYPE_TO_PREFIX_MAPPING[ours.peft_type] == "lora_"
    assert ours.peft_type not in PEFT_TYPE_TO_MIXED_MODEL_MAPPING


@pytest.fixture
def mappings_restored():
    tables = (PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING)
    kept = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


def test_registering_again_after_a_reload_takes_the_new_classes(ours, mappings_restored):
    class Reloaded(ours.model_class):
        pass

    register_tuner(ours.name, ours.config_class, ours.model_class, "lora_")
    assert PEFT_TYPE_TO_TUNER_MAPPING[ours.peft_type] is ours.model_class
    register_tuner(ours.name, ours.config_class, Reloaded, "lora_")
    assert PEFT_TYPE_TO_TUNER_MAPPING[ours.peft_type] is Reloaded


def test_registering_survives_a_peft_that_refuses_a_shared_prefix(ours, mappings_restored, monkeypatch):
    def refuse(**kwargs):
        raise KeyError("There is already a prefix called 'lora_'")

    for table in (PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING):
        del table[ours.peft_type]
    monkeypatch.setattr("hf_memeff.tuners.registry.register_peft_method", refuse)
    register_tuner(ours.name, ours.config_class, ours.model_class, "lora_")
    assert PEFT_TYPE_TO_TUNER_MAPPING[ours.peft_type] is ours.model_class
    assert PEFT_TYPE_TO_CONFIG_MAPPING[ours.peft_type] is ours.config_class
    assert PEFT_TYPE_TO_PREFIX_MAPPING[ours.peft_type] == "lora_"
