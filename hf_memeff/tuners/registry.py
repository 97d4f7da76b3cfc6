"""Make our tuners known to PEFT.

The one place that touches an internal of PEFT: `PeftType`, an enum that offers no way to extend it.
"""

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import PeftType, register_peft_method


def add_peft_type(name: str) -> PeftType:
    """Return the member `name` of `PeftType`, adding it if it is missing.

    An enum with members can't be subclassed and `register_peft_method` refuses unknown members, so the member goes
    into the tables that the enum machinery itself fills (CPython 3.11 to 3.13). Calling it again returns the same
    member. To be replaced when PEFT offers a way in.

    Args:
        name: upper-case name, which is also the value, as for PEFT's own members.

    Returns:
        The member; `PeftType(name)`, `PeftType[name]`, `PeftType.<name>`, pickling and copying give this very object.
    """
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType._member_names_)
    setattr(PeftType, name, member)  # before the tables: the enum refuses to set the name of a member
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    if hasattr(PeftType, "_hashable_values_"):  # from CPython 3.13, what `value in PeftType` looks at
        PeftType._hashable_values_.append(name)
    return member


def register_tuner(name: str, config_cls: type, model_cls: type, prefix: str) -> None:
    """Register a tuner with PEFT, once per process however often it is called.

    Args:
        name: lower-case name of the method; `add_peft_type(name.upper())` must have run before `config_cls` is
            instantiated.
        config_cls: its `PeftConfig` subclass.
        model_cls: its `BaseTuner` subclass.
        prefix: prefix of its parameter attributes; ours share LoRA's, so that files and tools for LoRA work unchanged.
    """
    peft_type = add_peft_type(name.upper())
    if PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type) is model_cls:
        return
    try:
        register_peft_method(name=name, config_cls=config_cls, model_cls=model_cls, prefix=prefix)
    except (KeyError, ValueError):
        # A reloaded module registers a new class under the old name, and a later PEFT may refuse to share "lora_".
        PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_cls
        PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model_cls
        PEFT_TYPE_TO_PREFIX_MAPPING[peft_type] = prefix
