"""Both methods, for tests of what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from peft.utils import PeftType

from hf_memeff import MespConfig, SageConfig
from hf_memeff.tuners.config import MemeffConfig
from hf_memeff.tuners.mesp import MespModel
from hf_memeff.tuners.model import MemeffModel
from hf_memeff.tuners.sage import SageModel


@dataclass(frozen=True)
class Method:
    """A method; calling it gives its config, set so that gradients are exactly LoRA's."""

    config_class: type[MemeffConfig]
    model_class: type[MemeffModel]
    exact: dict[str, Any]

    def __call__(self, **fields: Any) -> MemeffConfig:
        return self.config_class(**{**self.exact, **fields})

    def from_pretrained(self, *args: Any, **kwargs: Any) -> MemeffConfig:
        return self.config_class.from_pretrained(*args, **kwargs)

    @property
    def name(self) -> str:
        return self.config_class.method

    @property
    def peft_type(self) -> PeftType:
        return PeftType(self.name.upper())


METHODS = (Method(MespConfig, MespModel, {}), Method(SageConfig, SageModel, {"token_budget": 1.0}))


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def ours(request: pytest.FixtureRequest) -> Method:
    """Each method in turn."""
    return request.param
