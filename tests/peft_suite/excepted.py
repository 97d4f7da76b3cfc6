"""The tests of PEFT that the methods are excepted from, and why."""

from __future__ import annotations

BOTH = ("mesp", "sage")

_MIXED = "PeftMixedModel takes a fixed list of PeftTypes (`COMPATIBLE_TUNER_TYPES`); README names the limit"
_PLAIN = (
    "the saved folder is plain LoRA, so the model loaded from it is a LoRA model, to which PEFT adds no adapter of "
    "another type; its last step adds the method's config"
)
_OWN_FILE = "adapter_config.json is plain LoRA's by design; the method's type and options are not in it"
_STRICT = "a field that is unknown and not empty may change the maths, so it is refused where PEFT warns"

EXCEPTED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        BOTH,
        "tests/test_custom_models.py::TestPeftCustomModel::"
        "test_add_adapter_rejects_duplicate_name_without_mutation[True]",
        _MIXED,
    ),
    (BOTH, "tests/test_tuners_utils.py::TestModelAndLayerStatus::test_mixed_model_raises", _MIXED),
    (
        BOTH,
        "tests/test_custom_models.py::TestRequiresGrad::test_loading_model_requires_grad_set_correctly[False-LoraConfig]",
        _PLAIN,
    ),
    (
        BOTH,
        "tests/test_custom_models.py::TestRequiresGrad::test_loading_model_requires_grad_set_correctly[True-LoraConfig]",
        _PLAIN,
    ),
    (BOTH, "tests/test_config.py::TestPeftConfig::test_from_json_file[LoraConfig-mandatory_kwargs18]", _OWN_FILE),
    (
        BOTH,
        "tests/test_config.py::TestPeftConfig::"
        "test_from_pretrained_forward_compatible_load_from_peft_config[LoraConfig-mandatory_kwargs18]",
        _OWN_FILE,
    ),
    (
        BOTH,
        "tests/test_config.py::TestPeftConfig::test_from_pretrained_forward_compatible[LoraConfig-mandatory_kwargs18]",
        _STRICT,
    ),
)
"""Methods, id of the test in the run for LoRA, reason."""

LEFT_OUT: dict[str, str] = {"test_mixed.py": _MIXED}
"""Test files that are about something that both methods refuse, and why. Their tests are counted apart."""


def reasons_of(method: str) -> dict[str, str]:
    """Why a method is excepted, by test."""
    return {test: reason for methods, test, reason in EXCEPTED if method in methods}
