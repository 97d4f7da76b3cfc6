"""`MespConfig`: exactly LoRA's gradients, the least memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_memeff.tuners.config import MemeffConfig


@dataclass
class MespConfig(MemeffConfig):
    """Config of a LoRA adapter that trains with memory-efficient structured backpropagation.

    The adapter, its gradients and its files are LoRA's; only the memory its training takes differs. Every field of
    `LoraConfig` keeps its meaning and its place; the fields of this package are keyword-only, see `MemeffOptions`.
    Source: "Memory-Efficient Structured Backpropagation for On-Device LLM Fine-Tuning", arXiv 2602.13069.

    Example:
        ```python
        model = get_peft_model(model, MespConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        ```

    Raises:
        ValueError: a field is out of its range, or one of `REFUSED_VARIANTS` is set.
    """

    method: ClassVar[str] = "mesp"
    title: ClassVar[str] = "MeSP"
    promise: ClassVar[str] = "LoRA's gradients in less memory"
