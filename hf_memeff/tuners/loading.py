"""Load a saved adapter into a live model under a new name.

Our adapters are plain LoRA on disk, and `PeftModel.load_adapter` goes by the file's type: to a model of ours it would
add a LoRA adapter, which it refuses as one of another method. So a `PeftModel` that gets one of our tuners gets an
`AdapterLoader` in place of that method: on the instance, its class stays PEFT's.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from peft.config import PeftConfig
from peft.peft_model import PeftModel
from peft.utils import PeftType
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hf_memeff.tuners.config import config_classes


class AdapterLoader:
    """`PeftModel.load_adapter` for a model with one of our tuners.

    A LoRA adapter under a new name is added with the method of the model, and the options that its folder holds. All
    else is PEFT's own function. It knows its model by a weak reference, so that `del model` still frees the memory at
    once, and a copy or an unpickled model gets a loader of its own.

    Args:
        owner: the `PeftModel`.
    """

    def __init__(self, owner: PeftModel) -> None:
        self._owner = weakref.ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return AdapterLoader, (self._owner(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter; arguments, result and errors are those of `PeftModel.load_adapter`.

        Raises:
            ValueError: also where `MemeffConfig.from_pretrained` raises it: a field of the adapter's files breaks its
                rule, or the weights are a pickle.
        """
        owner: Any = self._owner()
        load = type(owner).load_adapter
        call = inspect.signature(load).bind(owner, *args, **kwargs)
        call.apply_defaults()
        if call.arguments["adapter_name"] not in owner.peft_config:
            _add_as_own(**call.arguments)
        return load(owner, *args, **kwargs)


def adopt_loader(tuner: nn.Module) -> None:
    """Give the `PeftModel` that is about to take a tuner in an `AdapterLoader`.

    PEFT doesn't tell a tuner which model it belongs to; torch does, when the model registers it as its child. The hook
    ends there, or with the tuner where no `PeftModel` takes it (`inject_adapter_in_model`).

    Args:
        tuner: ours, complete.
    """

    def look(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and child is wanted():
            hook.remove()
            if isinstance(parent, PeftModel):
                parent.load_adapter = AdapterLoader(parent)

    hook = register_module_module_registration_hook(look)
    wanted = weakref.ref(tuner, lambda _: hook.remove())


def _add_as_own(
    self: Any,
    model_id: Any,
    adapter_name: str,
    is_trainable: bool,
    autocast_adapter_dtype: bool,
    ephemeral_gpu_offload: bool,
    low_cpu_mem_usage: bool,
    kwargs: dict[str, Any],
    **others: Any,
) -> None:
    """Add the adapter that PEFT then loads the weights into; nothing happens for a file of another type."""
    hub_options, _ = self._split_kwargs(kwargs)
    if PeftConfig._get_peft_type(model_id, **hub_options) != PeftType.LORA:
        return
    config = config_classes()[self.base_model.method].from_pretrained(model_id, **hub_options)
    config.runtime_config.ephemeral_gpu_offload = ephemeral_gpu_offload
    self._check_new_adapter_config(config, is_trainable=is_trainable)
    config.inference_mode = not is_trainable
    self.add_adapter(
        adapter_name, config, low_cpu_mem_usage=low_cpu_mem_usage, autocast_adapter_dtype=autocast_adapter_dtype
    )
    if is_trainable:
        self.set_requires_grad(adapter_name)
