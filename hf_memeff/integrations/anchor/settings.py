"""The settings of a model's attention layers, and what they did: kept with its modules, never with its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import nn

from hf_memeff.integrations.anchor.calls import AttentionCall
from hf_memeff.ops.anchor.config import AnchorAttentionConfig
from hf_memeff.ops.anchor.dispatch import backend_name
from hf_memeff.ops.anchor.result import AnchorResult

_STATE = "_hf_memeff_anchor"


@dataclass
class LayerState:
    """Settings and counts of one attention module; a copy of the module takes a copy along.

    Attributes:
        config: what it runs with.
        layer: index of its layer, which calibrated thresholds are looked up by.
        sparse_calls: calls of which any head's superblock ran over kept keys.
        dense_calls: the others, by reason.
        candidates: candidate keys of the sparse calls, summed over heads and superblocks.
        kept: how many of them were attended.
        observer: takes the calls that would be sparse, which are then dense and not counted.
    """

    config: AnchorAttentionConfig
    layer: int
    sparse_calls: int = 0
    dense_calls: Counter[str] = field(default_factory=Counter)
    candidates: int = 0
    kept: int = 0
    observer: Callable[[AttentionCall, LayerState], None] | None = None

    def count(self, result: AnchorResult) -> None:
        """Add a call that was not dense beforehand."""
        self.candidates += result.candidates
        self.kept += result.kept
        if result.sparse_tiles:
            self.sparse_calls += 1
        else:
            self.dense_calls["kept share"] += 1


def layer_state(module: nn.Module) -> LayerState:
    """The state of an attention module, with default settings where none were set."""
    state = getattr(module, _STATE, None)
    if state is None:
        state = LayerState(AnchorAttentionConfig(), layer_index(module, 0))
        setattr(module, _STATE, state)
    return state


def layer_index(module: nn.Module, otherwise: int) -> int:
    """The module's own layer number, or another."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else otherwise


def layer_states(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerState]]:
    """Name, module and state of every attention module that has one."""
    for name, module in model.named_modules():
        state = getattr(module, _STATE, None)
        if state is not None:
            yield name, module, state


def set_anchor_config(model: nn.Module, config: AnchorAttentionConfig) -> None:
    """Let a model's attention layers run with these settings, from now on and counted from zero.

    They are kept with the attention modules, so that copies of the model take them along and `save_pretrained` does not
    write them. It makes no difference whether the model already runs with "anchor".

    Args:
        model: a transformers model, wrapped by PEFT or not.
        config: the settings.

    Raises:
        ValueError: not a config, a backend that does not exist, a model without attention modules, or thresholds that
            were calibrated for a model with other layers or heads.
    """
    if not isinstance(config, AnchorAttentionConfig):
        raise ValueError(
            f"set_anchor_config got a {type(config).__name__}, expected an AnchorAttentionConfig. "
            "Fix: set_anchor_config(model, AnchorAttentionConfig(theta=12.0))."
        )
    backend_name(config)
    modules = _attention_modules(model)
    _check_thresholds(modules, config)
    for number, module in enumerate(modules):
        setattr(module, _STATE, LayerState(config, layer_index(module, number)))


@contextmanager
def use_anchor_config(model: nn.Module, config: AnchorAttentionConfig) -> Iterator[None]:
    """Other settings inside a ``with`` block; afterwards those before it are back. Counts start from zero in the
    block and are dropped after it; arguments and errors as `set_anchor_config`. They are the model's, for every thread
    that runs it: threads that want different settings at one time need models of their own, with shared weights or not.
    """
    with _restored(model):
        set_anchor_config(model, config)
        yield


@contextmanager
def observed(
    model: nn.Module, observer: Callable[[AttentionCall, LayerState], None], **changes: object
) -> Iterator[None]:
    """Hand an observer the calls that would be sparse, with some settings changed; all is as before afterwards."""
    with _restored(model):
        for number, module in enumerate(_attention_modules(model)):
            state = getattr(module, _STATE, None) or LayerState(AnchorAttentionConfig(), layer_index(module, number))
            config = replace(state.config, **changes)
            setattr(module, _STATE, LayerState(config, state.layer, observer=observer))
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every module's state, or its absence, back afterwards."""
    before = [(module, getattr(module, _STATE, None)) for module in model.modules()]
    try:
        yield
    finally:
        for module, state in before:
            if state is not None:
                setattr(module, _STATE, state)
            elif hasattr(module, _STATE):
                delattr(module, _STATE)


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that may call an attention function: those that say whether they are causal, or are named attention."""
    found = [m for m in model.modules() if hasattr(m, "is_causal") or "Attention" in type(m).__name__]
    if not found:
        raise ValueError(
            f"got a {type(model).__name__} without attention modules, expected a transformers model. "
            "Fix: pass the model itself, not a trainer or a pipeline."
        )
    return found


def _check_thresholds(modules: list[nn.Module], config: AnchorAttentionConfig) -> None:
    if config.thresholds is None:
        return
    causal = {layer_index(m, n): m for n, m in enumerate(modules) if getattr(m, "is_causal", False)}
    for layer, row in config.thresholds.items():
        heads = getattr(getattr(causal.get(layer), "config", None), "num_attention_heads", len(row))
        if layer not in causal or heads != len(row):
            has = f"{heads} heads" if layer in causal else f"no layer {layer}"
            raise ValueError(
                f"got {len(row)} thresholds for layer {layer}, expected those of this model, which has {has}. "
                "Fix: calibrate this model with calibrate_anchor(model, input_ids)."
            )
