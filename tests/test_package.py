"""The package as a whole: what importing it does, its public names, and what installing it asks for."""

import tomllib
from pathlib import Path

import pytest

import hf_memeff
from helpers import run_python
from hf_memeff import compat

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_public_names_exist():
    for name in hf_memeff.__all__:
        assert getattr(hf_memeff, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        hf_memeff.Nonsense  # noqa: B018


def test_importing_needs_no_optional_library_and_registers_tuners_and_anchor():
    result = run_python(
        """
import sys
for name in ('triton', 'trl', 'datasets', 'evaluate', 'gguf', 'matplotlib', 'bitsandbytes'):
    sys.modules[name] = None
import hf_memeff
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
assert PEFT_TYPE_TO_CONFIG_MAPPING['MESP'] is hf_memeff.MespConfig
assert PEFT_TYPE_TO_CONFIG_MAPPING['SAGE'] is hf_memeff.SageConfig
from transformers import AttentionInterface, AttentionMaskInterface
assert 'anchor' in AttentionInterface() and 'anchor' in AttentionMaskInterface()
for name in ('AdapterHealthCallback', 'GradientProbeCallback', 'MespCallback', 'PeakMemoryCallback',
             'SageBudgetCallback', 'SageCallback'):
    assert getattr(hf_memeff, name).__name__ == name
print('ok')
"""
    )
    assert result.returncode == 0 and result.stdout == "ok\n", result.stderr[-2000:]


def test_importing_changes_nothing_but_registries():
    """No patched class or function, thread setting, log handler, random state or environment variable."""
    result = run_python(
        """
import logging, os, torch, transformers, peft
from peft.tuners import lora, tuners_utils
from peft.utils import save_and_load
modules = [torch.nn.Module, torch.nn.Linear, peft, peft.PeftModel, peft.LoraConfig, lora.LoraModel, lora.Linear,
           lora.layer, tuners_utils, save_and_load, transformers.PreTrainedModel]
before = [dict(vars(m)) for m in modules]
state = dict(os.environ), torch.get_num_threads(), list(logging.root.handlers), torch.get_rng_state().tolist()
import hf_memeff
for module, kept in zip(modules, before):
    changed = [k for k, v in vars(module).items() if k not in kept or kept[k] is not v]
    assert not changed, (module, changed)
assert state == (dict(os.environ), torch.get_num_threads(), list(logging.root.handlers), torch.get_rng_state().tolist())
print('ok')
"""
    )
    assert result.returncode == 0 and result.stdout == "ok\n", result.stderr[-2000:]


def test_dependencies_are_ranges_and_extras_leave_torch_alone():
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"demo", "trl", "quant", "test", "dev"}
    assert not any(line.replace(" ", "").startswith("torch") for lines in extras.values() for line in lines)
    assert not any(
        "==" in line.split(";")[0] for lines in [project["dependencies"], *extras.values()] for line in lines
    )
    assert "triton; sys_platform == 'linux'" in extras["test"]
    assert extras["quant"] == ["bitsandbytes; sys_platform == 'linux'"]


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.21.2", (0, 21, 2)), ("2.13.0+cpu", (2, 13, 0)), ("0.22.0.dev0", (0, 22, 0)), ("5", (5,))]
)
def test_installed_version_reads_the_release_numbers(monkeypatch, text, numbers):
    monkeypatch.setattr(compat, "version", lambda name: text)
    assert compat.installed_version("anything") == numbers


def test_a_missing_distribution_has_no_version():
    assert compat.installed_version("no-such-distribution-here") is None


def test_an_old_peft_is_refused_with_a_readable_error(monkeypatch):
    compat.require_peft()
    monkeypatch.setattr(compat, "version", lambda name: "0.19.1")
    with pytest.raises(ImportError, match=r"got PEFT 0\.19\.1, expected 0\.20 or newer\. Fix: pip install"):
        compat.require_peft()


def test_c76_a_transformers_that_runs_code_named_in_a_config_is_warned_of(monkeypatch, recwarn):
    compat.warn_of_unsafe_transformers()
    monkeypatch.setattr(compat, "version", lambda name: "5.3.0")
    compat.warn_of_unsafe_transformers()
    assert not recwarn
    monkeypatch.setattr(compat, "version", lambda name: "5.2.1")
    with pytest.warns(UserWarning, match=r"got transformers 5\.2\.1, expected 5\.3 or newer.*Fix: pip install"):
        compat.warn_of_unsafe_transformers()
