"""Memory-efficient fine-tuning and long prompts for Hugging Face models: LoRA's exact gradients in far less activation
memory (MeSP), LoRA's forward with a backward pass through salient tokens (SAGE), sparse attention in prefill
(`attn_implementation="anchor"`).

Importing this package registers its tuners with PEFT and "anchor" with transformers, and does nothing else. The
callbacks work with any adapter:
`PeakMemoryCallback` logs what a step needs, `AdapterHealthCallback` names adapters that do not learn.
"""

from typing import TYPE_CHECKING, Any

from hf_memeff.compat import PACKAGE_VERSION as __version__
from hf_memeff.compat import require_peft, warn_of_unsafe_transformers

require_peft()
warn_of_unsafe_transformers()

from hf_memeff.integrations.attention import (  # noqa: E402
    AnchorAttentionConfig,
    anchor_report,
    calibrate_anchor,
    register_anchor,
    set_anchor_config,
    use_anchor_config,
)
from hf_memeff.memory import measure_peak_memory, saved_tensor_bytes  # noqa: E402
from hf_memeff.tuners.attach import attach, detach, memeff_status  # noqa: E402
from hf_memeff.tuners.mesp import MespConfig  # noqa: E402
from hf_memeff.tuners.sage import SageConfig  # noqa: E402

register_anchor()

if TYPE_CHECKING:
    from hf_memeff.integrations.callbacks import (
        AdapterHealthCallback,
        GradientProbeCallback,
        MespCallback,
        PeakMemoryCallback,
        SageBudgetCallback,
        SageCallback,
    )

__all__ = [
    "AdapterHealthCallback",
    "AnchorAttentionConfig",
    "GradientProbeCallback",
    "MespCallback",
    "MespConfig",
    "PeakMemoryCallback",
    "SageBudgetCallback",
    "SageCallback",
    "SageConfig",
    "__version__",
    "anchor_report",
    "attach",
    "calibrate_anchor",
    "detach",
    "measure_peak_memory",
    "memeff_status",
    "saved_tensor_bytes",
    "set_anchor_config",
    "use_anchor_config",
]

_CALLBACKS = {name for name in __all__ if name.endswith("Callback")}


def __getattr__(name: str) -> Any:
    """Load what needs transformers' Trainer when it is first asked for."""
    if name in _CALLBACKS:
        from hf_memeff.integrations import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
