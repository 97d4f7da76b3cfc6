"""MeSP: LoRA trained by memory-efficient structured backpropagation."""

from hf_memeff.tuners.mesp.config import MespConfig
from hf_memeff.tuners.mesp.model import MespModel
from hf_memeff.tuners.registry import register_tuner

register_tuner(MespModel.method, MespConfig, MespModel, MespModel.prefix)

__all__ = ["MespConfig", "MespModel"]
