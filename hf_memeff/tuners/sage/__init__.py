"""SAGE: LoRA trained through the salient tokens of each block."""

from hf_memeff.tuners.registry import register_tuner
from hf_memeff.tuners.sage.config import SageConfig
from hf_memeff.tuners.sage.model import SageModel

register_tuner(SageModel.method, SageConfig, SageModel, SageModel.prefix)

__all__ = ["SageConfig", "SageModel"]
