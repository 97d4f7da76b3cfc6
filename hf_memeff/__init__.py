"""Memory-efficient fine-tuning for Hugging Face models: LoRA's exact gradients, far less activation memory."""

from hf_memeff.compat import PACKAGE_VERSION as __version__

__all__ = ["__version__"]
