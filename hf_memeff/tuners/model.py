"""`MemeffModel`: PEFT's LoRA model whose decoder blocks run through the memory-efficient engine."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

from peft.tuners.lora import LoraConfig, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, onload_layer
from peft.utils import PeftType
from torch import Tensor, nn

from hf_memeff.blocks.attach import attach_blocks, detach_blocks
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.blocks.store import make_store
from hf_memeff.tuners.checks import check_adapter_name, check_base_dtypes, warn_of_bare_experts, warn_of_sharded_factors
from hf_memeff.tuners.layer import use_memeff_linears, use_stock_linears
from hf_memeff.tuners.loading import adopt_loader
from hf_memeff.tuners.merging import check_base_layers_can_merge, untied_embeddings, warn_of_tied_embeddings
from hf_memeff.tuners.quantised import check_biases_can_merge, kept_quantised_bases, unmerge_exactly


class MemeffModel(LoraModel):
    """Base of this package's tuners: inject LoRA adapters and attach the engine to the blocks around them.

    Adapters, switching, merging and files are PEFT's own code. The engine follows the options of the active adapter.

    Attributes:
        method: lower-case name of the method, as in its config.
    """

    method: ClassVar[str]
    prefix: str = "lora_"
    _options: EngineOptions | None = None
    _new_tags: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt_loader(self)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, the first one or a further one, as `LoraModel` does, then attach the engine.

        Raises:
            ValueError: the name collides with a part of a key, a base layer has a dtype that can't train, no target
                module matches, or the engine refuses an option for this model (see `attach_blocks`).
            OSError: the folder of the activation store can't be used.
            RuntimeError: a block can't run structured and `strict` is set.
        """
        config = self.peft_config[adapter_name]
        check_adapter_name(adapter_name, [name for name in self.peft_config if name != adapter_name], model)
        check_base_dtypes(model)
        make_store(config.activation_store, config.activation_store_dir)  # refuses a folder that can't be used
        with _as_lora(config):
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        warn_of_bare_experts(model, config)
        try:
            self.attach_engine()
        except Exception:
            self._take_back(adapter_name)
            raise
        if not self._new_tags and hasattr(model, "add_model_tags"):
            self._new_tags = tuple(tag for tag in config.tags() if tag not in (model.model_tags or ()))
            model.add_model_tags(list(self._new_tags))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, hooks included: peft 0.20 calls its forward alone. Delete when `MINIMUM_PEFT` is 0.21."""
        return self.model(*args, **kwargs)

    def attach_engine(self, options: EngineOptions | None = None) -> None:
        """Attach the engine, or have it look at the adapters again; without `options`, with the active adapter's."""
        options = self._active_options() if options is None else options
        self._options = None
        use_stock_linears(self.model)
        attach_blocks(self.model, options)
        use_memeff_linears(self.model)
        self._options = options

    def detach_engine(self) -> None:
        """Take the engine off; the adapters stay and run as PEFT's own LoRA."""
        detach_blocks(self.model)
        use_stock_linears(self.model)
        self._options = None

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Activate adapters as `LoraModel` does, and take over the options of the first."""
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        if self._options is not None and self._active_options() != self._options:
            self.attach_engine()

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter as `LoraModel` does; without any left, the engine is taken off."""
        super().delete_adapter(adapter_name)
        if self._options is None:
            return
        if self.peft_config:
            self.attach_engine()
        else:
            self.detach_engine()

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Merge in place as `LoraModel` does, with a warning where the adapted embeddings are tied.

        Quantised weights are kept aside, so that unmerging brings them back bit for bit.
        """
        warn_of_tied_embeddings(self.model)
        with kept_quantised_bases(self.model):
            super().merge_adapter(*args, **kwargs)

    def unmerge_adapter(self) -> None:
        """Unmerge as `LoraModel` does; quantised base weights become what they were before, bit for bit."""
        for layer in [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]:
            if not unmerge_exactly(layer):
                with onload_layer(layer):
                    layer.unmerge()

    def disable_adapter_layers(self) -> None:
        """Disable the adapters as `LoraModel` does, whose layers unmerge themselves in their next call.

        Quantised ones are unmerged here, since that would round their weights anew.
        """
        for layer in list(self.model.modules()):
            unmerge_exactly(layer)
        super().disable_adapter_layers()

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        check_base_layers_can_merge(self.model)
        check_biases_can_merge(self.model)

    def _active_options(self) -> EngineOptions:
        names = [name for name in self.active_adapters if name in self.peft_config] or list(self.peft_config)
        return self.peft_config[names[0]].engine_options()

    def _take_back(self, adapter_name: str) -> None:
        """Undo an injection after which the engine could not be attached."""
        if len(self.peft_config) > 1:
            super().delete_adapter(adapter_name)
            self.attach_engine()
        else:
            self._unload_and_optionally_merge(merge=False)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        """Take the engine off, then the adapters; the engine comes back if merging is refused."""
        if merge:
            check_base_layers_can_merge(self.model)
            check_biases_can_merge(self.model)
        was_attached = self._options is not None
        self.detach_engine()
        try:
            with untied_embeddings(self.model) if merge else nullcontext():
                model = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        except Exception:
            if was_attached:
                self.attach_engine()
            raise
        if self._new_tags:
            model.model_tags = [tag for tag in model.model_tags if tag not in self._new_tags]
            if not model.model_tags:
                del model.model_tags  # the class says None
            self._new_tags = ()
        return model

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """An adapter's tensors as `LoraModel` selects them for a file, with its warning of shards."""
        selected = super()._get_adapter_state_dict(model, config, adapter_name, *args, **kwargs)
        warn_of_sharded_factors(selected, adapter_name)
        return selected

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Fit a file's keys to the model as `LoraModel` does; name tensors without a place, which PEFT just drops."""
        if hasattr(getattr(model, "config", None), "model_type"):
            from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

            with _as_lora(config):
                state_dict = convert_peft_adapter_state_dict_for_transformers(
                    model=model, peft_config=config, adapter_state_dict=state_dict, adapter_name=adapter_name
                )
        fitted = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        homeless = sorted(set(fitted) - set(model.state_dict()))
        if homeless:
            warnings.warn(
                f"{len(homeless)} of {len(fitted)} tensors in the adapter's file have no place in this model and are "
                f"not used, {homeless[0]!r} among them. Does the config name the same target modules?",
                stacklevel=4,
            )
        return fitted

    @classmethod
    def _convert_state_dict_for_initial_model(
        cls,
        peft_model: nn.Module,
        peft_config: Any,
        path_initial_model_for_weight_conversion: str,
        output_state_dict: dict[str, Tensor],
        kwargs: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Turn an adapter that changed the base weights (PiSSA, ...) into plain LoRA, as `LoraModel` does.

        PEFT loads the initial adapter by its file, whose type is LORA and could not join ours; so it is added as ours
        first.
        """
        initial = copy.deepcopy(peft_config)
        initial.init_lora_weights = True  # PEFT sets this for its own type only; else the base weights change again
        peft_model.add_adapter(os.path.basename(path_initial_model_for_weight_conversion), initial)
        return super()._convert_state_dict_for_initial_model(
            peft_model, peft_config, path_initial_model_for_weight_conversion, output_state_dict, kwargs
        )


@contextmanager
def _as_lora(config: LoraConfig) -> Iterator[None]:
    """Let PEFT take a config for its own: it fits only that type to the fused experts of transformers 5 (peft 0.21)."""
    own, config.peft_type = config.peft_type, PeftType.LORA
    try:
        yield
    finally:
        config.peft_type = own
