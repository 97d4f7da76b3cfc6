"""pytest plug-in of a run of PEFT's tests: which tests run, equal seeds, no Hub, and a record of what each test did."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import hf_memeff

from .outcomes import Outcome, add_outcome, passed_tests, read_outcomes
from .source import REPLACED


class _AlwaysSeen(defaultdict[str, int]):
    """PEFT's list of models that were loaded before, which its tests then don't look for on the Hub: all of them."""

    def __contains__(self, key: object) -> bool:
        return True


class Recorder:
    """Writes down what each test does, and whether it used the config class of the run.

    Args:
        config: the class that stands for LoraConfig.
        path: file of the record; tests that passed in it don't run again.
        wanted: ids of the tests to run; None for all.
    """

    def __init__(self, config: type, path: Path, wanted: set[str] | None) -> None:
        self.config = config
        self.path = path
        self.wanted = wanted
        self.done = passed_tests(read_outcomes(path))
        self.used = False
        self.reports: list[pytest.TestReport] = []
        self._watch()

    def _watch(self) -> None:
        """Notice it when a config of this class is made or an adapter with it is added."""
        made, added = self.config.__post_init__, peft.LoraModel.inject_adapter
        recorder = self

        def make(config: Any) -> None:
            recorder.notice(config)
            made(config)

        def add(tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
            recorder.notice(tuner.peft_config[adapter_name])
            return added(tuner, model, adapter_name, *args, **kwargs)

        self.config.__post_init__ = make
        peft.LoraModel.inject_adapter = add

    def notice(self, value: Any) -> None:
        """Note the use of the class; its subclasses (AdaLoraConfig) are other methods."""
        self.used = self.used or type(value) is self.config

    def name(self, item: pytest.Item) -> str:
        """A test's id in the run for LoRA."""
        return item.nodeid.replace(self.config.__name__, REPLACED)

    def belongs(self, item: pytest.Item) -> bool:
        """Whether a test may use the class: not if it is given classes of configs, and this is none of them."""
        classes = [
            value for value in _parameters(item) if isinstance(value, type) and issubclass(value, peft.PeftConfig)
        ]
        return not classes or self.config in classes

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests that are wanted, may use the class and did not pass yet."""
        kept, dropped = [], []
        for item in items:
            wanted = self.wanted is None or self.name(item) in self.wanted
            keep = wanted and self.name(item) not in self.done and self.belongs(item)
            (kept if keep else dropped).append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test from a fixed seed and write down its outcome."""
        self.used, self.reports = False, []
        for value in _parameters(item):
            self.notice(value)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        result = yield
        add_outcome(self.path, self.name(item), self._outcome())
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the reports on a test's setup, call and teardown."""
        self.reports.append(report)

    def _outcome(self) -> Outcome:
        worst = next((r for kind in ("failed", "skipped") for r in self.reports if r.outcome == kind), None)
        seconds = round(sum(report.duration for report in self.reports), 3)
        if worst is None:
            return Outcome("passed", self.used, seconds, "")
        crash = getattr(worst.longrepr, "reprcrash", None)
        skip = worst.longrepr[2] if isinstance(worst.longrepr, tuple) else worst.longrepr
        return Outcome(worst.outcome, self.used, seconds, str(crash.message if crash is not None else skip)[:400])


def _parameters(item: pytest.Item) -> list[Any]:
    return list(getattr(getattr(item, "callspec", None), "params", {}).values())


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a run is told; `peft_suite.__main__` starts it."""
    group = parser.getgroup("peft_suite")
    group.addoption("--suite-config", required=True, help="class that the tests take for LoraConfig")
    group.addoption("--suite-record", required=True, type=Path, help="file for the outcomes, one JSON object a line")
    group.addoption("--suite-wanted", type=Path, help="file with a JSON list of the tests to run")


def pytest_configure(config: pytest.Config) -> None:
    """Set up the run."""
    name = config.getoption("--suite-config")
    if name == "SageConfig":
        set_default(hf_memeff.SageConfig, "token_budget", 1.0)
    path = config.getoption("--suite-wanted")
    wanted = None if path is None else set(json.loads(path.read_text(encoding="utf-8")))
    cls = peft.LoraConfig if name == REPLACED else getattr(hf_memeff, name)
    config.pluginmanager.register(Recorder(cls, config.getoption("--suite-record"), wanted))


def pytest_collection() -> None:
    """Keep PEFT's tests off the Hub."""
    from tests import testing_utils  # PEFT's, in the folder that pytest runs in

    testing_utils._HUB_MODEL_ACCESSES = _AlwaysSeen(int)


def set_default(config: type, name: str, value: Any) -> None:
    """Give a keyword-only field of a config class another default, wherever a config of it is made."""
    config.__init__.__kwdefaults__[name] = value
    setattr(config, name, value)
    next(item for item in dataclasses.fields(config) if item.name == name).default = value
