"""Files from strangers are data (cases C75 and C77): nothing they hold is imported, run, fetched or used as a path."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model

import hf_memeff
from helpers import forbid_network, tiny_model
from hf_memeff import MespConfig, SageConfig
from hf_memeff.tuners.portable import OPTIONS_NAME

CONFIG_NAME = "adapter_config.json"
URL = "http://example.invalid/x"
HOSTILE = {
    "module": "os",
    "climbing_path": "../../x",
    "url": URL,
    "dict": {"base_model_class": "system", "parent_library": "os"},
    "10_MB": "x" * 10_000_000,
}
FREE_TEXT = ("base_model_name_or_path", "revision", "target_modules", "exclude_modules")
"""Fields where "os" is a possible name of a model, a branch or a module of the base model, and stays a name."""


def save_clean(folder: Path, config_class: type) -> Path:
    """Save an adapter and read it once, so that lazy imports are done."""
    config = config_class(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(tiny_model(), config).save_pretrained(folder)
    config_class.from_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Folder of a saved adapter."""
    return save_clean(tmp_path_factory.mktemp("clean"), MespConfig)


@pytest.fixture(scope="module")
def clean_sage(tmp_path_factory):
    """Folder of a saved adapter of SAGE."""
    return save_clean(tmp_path_factory.mktemp("clean_sage"), SageConfig)


def fields() -> list[tuple[str, str]]:
    """Every (file, field) that a saved adapter of MeSP has."""
    config = MespConfig()
    options = ["method", "hf_memeff_version", *MespConfig.option_rules()]
    lora = [name for name in config.to_dict() if name not in options]
    return [(CONFIG_NAME, name) for name in lora] + [(OPTIONS_NAME, name) for name in options]


def plant(clean: Path, folder: Path, filename: str, field: str, value) -> None:
    """A copy of the adapter's files in which one field has another value."""
    for name in (CONFIG_NAME, OPTIONS_NAME):
        data = json.loads((clean / name).read_text())
        if name == filename:
            data[field] = value
        (folder / name).write_text(json.dumps(data))


@pytest.mark.parametrize(("filename", "field"), fields())
def test_c75_each_hostile_value_of_each_field_is_refused(clean, tmp_path, filename, field):
    for kind, value in HOSTILE.items():
        plant(clean, tmp_path, filename, field, value)
        modules = set(sys.modules)
        with forbid_network():
            if kind == "module" and field in FREE_TEXT:
                assert getattr(MespConfig.from_pretrained(tmp_path), field) == "os"
            else:
                message = r"got .*expected .*Fix: "
                if (field, kind) == ("layers_pattern", "module"):  # a name of layers, which PEFT wants numbers with
                    message = "`layers_to_transform` must also be specified"
                with pytest.raises(ValueError, match=message) as error:
                    MespConfig.from_pretrained(tmp_path)
                assert len(str(error.value)) < 1000
        assert set(sys.modules) == modules, kind


@pytest.mark.parametrize("reader", [MespConfig, SageConfig])
@pytest.mark.parametrize("field", ["method", "hf_memeff_version", *SageConfig.option_rules()])
def test_c75_each_hostile_value_of_each_field_of_sage_is_refused_by_both_methods(clean_sage, tmp_path, field, reader):
    for kind, value in HOSTILE.items():
        plant(clean_sage, tmp_path, OPTIONS_NAME, field, value)
        modules = set(sys.modules)
        with forbid_network(), pytest.raises(ValueError, match=r"got .*expected .*Fix: ") as error:
            reader.from_pretrained(tmp_path)
        assert len(str(error.value)) < 1000
        assert set(sys.modules) == modules, kind


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("saliency", "Attention"),
        ("token_budget", 0),
        ("token_budget", 1.5),
        ("token_budget", float("nan")),
        ("token_budget", float("inf")),
        ("token_budget", True),
        ("token_budget", 10**400),
        ("token_budget", -(10**400)),
        ("attention_mass", "0.8"),
        ("attention_mass", 10**400),
        ("min_tokens", 10**400),
        ("min_tokens", 8.0),
        ("sink_tokens", -1),
        ("keep_last", None),
        ("dense_layers", [0, 0]),
        ("dense_layers", ["os"]),
        ("dense_layers", [[0]]),
        ("dense_layers", [10**400]),
        ("dense_layers", {"0": 1}),
        ("query_rows", -1),
        ("query_rows", ["labels"]),
        ("method", "lora"),
        ("method", None),
        ("method", ["sage"]),
    ],
)
def test_c75_values_of_sage_s_fields_are_checked_inside(clean_sage, tmp_path, field, value):
    plant(clean_sage, tmp_path, OPTIONS_NAME, field, value)
    with forbid_network(), pytest.raises(ValueError, match=r"got .*expected .*Fix: "):
        SageConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_budget", "adaptive"),
        ("token_budget", 1),
        ("token_budget", 1e-3),
        ("dense_layers", []),
        ("dense_layers", [0, -1]),
        ("query_rows", "last"),
        ("query_rows", 16),
    ],
)
def test_c75_what_sage_itself_writes_is_read(clean_sage, tmp_path, field, value):
    plant(clean_sage, tmp_path, OPTIONS_NAME, field, value)
    found = getattr(SageConfig.from_pretrained(tmp_path), field)
    assert found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", [URL]),
        ("target_modules", ["q_proj", {"a": 1}]),
        ("target_modules", "a" * 9000),
        ("modules_to_save", ["../../x"]),
        ("rank_pattern", {"q_proj": "os"}),
        ("rank_pattern", {URL: 1}),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": [1]}),
        ("trainable_token_indices", {"embed_tokens": ["os"]}),
        ("trainable_token_indices", [-1]),
        ("corda_config", {"cache_file": "os"}),
        ("corda_config", {"covariance_file": "../../x", "corda_method": "kpm"}),
        ("corda_config", {"corda_method": "os"}),
        ("eva_config", {"rho": 2.0, "__class__": "os"}),
        ("arrow_config", {"task_adapter_names": [URL]}),
        ("megatron_core", "os.path"),
        ("megatron_config", {"num_layers": 1}),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM"}),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "parent_library": "subprocess"}),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "parent_library": "a;import os"}),
        ("init_lora_weights", "pissa_niter_99999999999"),
        ("r", True),
        ("r", 0),
        ("r", -8),
        ("r", 2**40),
        ("r", 8.0),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_dropout", 1.5),
        ("lora_dropout", -0.1),
        ("bias", "everything"),
        ("layer_replication", [[0, 1, 2]]),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("base_model_name_or_path", "..\\..\\x"),
        ("base_model_name_or_path", "//host/share"),
        ("base_model_name_or_path", "a\nb"),
        ("revision", "main\0"),
    ],
)
def test_c75_values_of_the_right_kind_are_checked_inside(clean, tmp_path, field, value):
    plant(clean, tmp_path, CONFIG_NAME, field, value)
    with forbid_network(), pytest.raises(ValueError, match=rf"got .*{field}.*expected .*Fix: "):
        MespConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", r".*\.layers\..*\.(q|v)_proj"),
        ("target_modules", ["q_proj", "v_proj"]),
        ("rank_pattern", {r".*\.0\..*q_proj": 4}),
        ("alpha_pattern", {"q_proj": 0.5}),
        ("trainable_token_indices", {"embed_tokens": [1, 2]}),
        ("eva_config", {"rho": 2.0, "use_label_mask": True}),
        ("corda_config", {"corda_method": "kpm", "cache_file": None}),
        ("auto_mapping", {"base_model_class": "Net", "parent_library": "my_models.net"}),
        ("init_lora_weights", "pissa_niter_4"),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("layers_to_transform", [0, 1]),
        ("base_model_name_or_path", "/home/user/model"),
        ("base_model_name_or_path", "HuggingFaceTB/SmolLM2-135M"),
        ("base_model_name_or_path", ""),
        ("peft_version", "0.22.0.dev0@0a1b2c"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*_config` specified but will be ignored")
def test_c75_what_peft_itself_writes_is_read(clean, tmp_path, field, value):
    plant(clean, tmp_path, CONFIG_NAME, field, value)
    MespConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("filename", [CONFIG_NAME, OPTIONS_NAME])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'"os"',
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"r": 1' + b"0" * 5000 + b"}",
        b" " * 10_000_000 + b"{}",
        pickle.dumps({"peft_type": "LORA"}),
    ],
    ids=["empty", "list", "string", "cut", "not_utf8", "deep", "huge_number", "10_MB", "pickle"],
)
def test_c75_files_that_are_not_small_json_objects_are_refused(clean, tmp_path, filename, content):
    plant(clean, tmp_path, CONFIG_NAME, "r", 2)
    (tmp_path / filename).write_bytes(content)
    with forbid_network(), pytest.raises(ValueError, match=r"got .*expected .*Fix: "):
        MespConfig.from_pretrained(tmp_path)


def test_c75_a_stranger_s_auto_mapping_is_not_kept(clean, tmp_path):
    mapping = {"base_model_class": "Net", "parent_library": "my_models.net"}
    plant(clean, tmp_path, CONFIG_NAME, "auto_mapping", mapping)
    assert MespConfig.from_pretrained(tmp_path).auto_mapping is None


def test_c75_a_local_folder_is_never_looked_up_on_the_hub(tmp_path):
    with forbid_network(), pytest.raises(ValueError, match=r"got no adapter_config\.json"):
        MespConfig.from_pretrained(tmp_path)


class _Bomb:
    """Unpickling it makes a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return (subprocess.check_call, (["touch", str(self.sentinel)],))


@pytest.fixture
def pickled(clean, tmp_path):
    """An adapter folder whose weights are a hostile pickle, and the file that running it would make."""
    plant(clean, tmp_path, CONFIG_NAME, "r", 2)
    sentinel = tmp_path / "was_executed"
    torch.save({"weight": _Bomb(sentinel)}, tmp_path / "adapter_model.bin")
    return tmp_path, sentinel


def test_c77_the_bomb_works():
    """Else the tests below would show nothing."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sentinel = Path(folder) / "made"
        pickle.loads(pickle.dumps(_Bomb(sentinel)))
        assert sentinel.exists()


@pytest.mark.parametrize("config_class", [MespConfig, SageConfig])
def test_c77_a_pickle_adapter_is_refused_and_never_executed(pickled, config_class):
    folder, sentinel = pickled
    with pytest.raises(
        ValueError, match=r"got adapter_model.bin \(a pickle.*expected adapter_model.safetensors.*Fix: "
    ):
        PeftModel.from_pretrained(tiny_model(), folder, config=config_class.from_pretrained(folder), is_trainable=True)
    assert not sentinel.exists()


@pytest.mark.parametrize("config_class", [MespConfig, SageConfig])
def test_c77_a_harmless_pickle_is_refused_too(clean, tmp_path, config_class):
    plant(clean, tmp_path, CONFIG_NAME, "r", 2)
    torch.save({"base_model.model.x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle"):
        config_class.from_pretrained(tmp_path)


def test_c77_a_config_made_in_code_does_not_get_a_pickle_executed_either(pickled):
    folder, sentinel = pickled
    config = MespConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        PeftModel.from_pretrained(tiny_model(), folder, config=config)
    model = get_peft_model(tiny_model(), config)
    model.add_adapter("b", MespConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        model.load_adapter(folder, "b")
    assert not sentinel.exists()


def test_c77_a_pickle_beside_safetensors_is_not_read(clean, tmp_path):
    for name in (CONFIG_NAME, OPTIONS_NAME, "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((clean / name).read_bytes())
    sentinel = tmp_path / "was_executed"
    torch.save({"weight": _Bomb(sentinel)}, tmp_path / "adapter_model.bin")
    PeftModel.from_pretrained(tiny_model(), tmp_path, config=MespConfig.from_pretrained(tmp_path))
    assert not sentinel.exists()


def test_c77_we_write_no_pickle(clean):
    suffixes = {path.suffix for path in clean.iterdir()}
    assert suffixes == {".json", ".safetensors", ".md"}


FORBIDDEN_CALLS = {"torch.load", "eval", "exec", "importlib.import_module", "__import__", "pickle.load", "pickle.loads"}


def test_c77_the_package_calls_nothing_that_runs_files():
    """No unpickling, no eval, no import by name anywhere in the package."""
    found = []
    for path in Path(hf_memeff.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found += [
                    f"{path.name}:{node.lineno} import {name}"
                    for name in names
                    if name.split(".")[0] in ("pickle", "dill")
                ]
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found.append(f"{path.name} trust_remote_code")
    assert not found, found
