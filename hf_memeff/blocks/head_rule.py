"""What a causal LM makes of its head's output, read from its config and proven on random hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.ops.dropout import replayed_rng, save_rng
from hf_memeff.ops.linear_cross_entropy import linear_cross_entropy

_MISSING = object()


@dataclass(frozen=True)
class HeadRule:
    """What a model does to ``lm_head``'s output: ``softcap tanh(scale z / softcap)``; ``softcap`` is ``None`` without
    one.
    """

    scale: float = 1.0
    softcap: float | None = None


def head_rule(config: Any) -> HeadRule:
    """Read scale and softcap from a model's config, under the names the families use for them."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(text, name, None)
        if isinstance(value, int | float):
            scale = float(value)
            break
    else:
        divisor = getattr(text, "logits_scaling", None)
        if isinstance(divisor, int | float) and divisor:
            scale = 1.0 / float(divisor)
    cap = getattr(text, "final_logit_softcapping", None)
    return HeadRule(scale, float(cap) if isinstance(cap, int | float) and cap else None)


class _Stop(Exception):
    """Raised by the check's loss function to leave the model's forward with its logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits


def check_rule(model: Any, rule: HeadRule) -> str:
    """Prove the head rule: feed random hidden states to the model's own head path, without running its blocks.

    The backbone's forward is replaced on the instance for this one call. Random state, modes and gradients stay as
    they are.
    """
    backbone = model.base_model
    if backbone is model:
        return "the model has no separate backbone"
    weight = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 5, weight.shape[-1], generator=generator).to(weight.device, weight.dtype)
    labels = torch.zeros(1, 5, dtype=torch.long, device=weight.device)

    def give_hidden(*_: Any, **__: Any) -> Any:
        return _BackboneOutput(hidden)

    def stop(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        raise _Stop(logits)

    saved = backbone.__dict__.get("forward", _MISSING), model.__dict__.get("_loss_function", _MISSING)
    hooks = {n: backbone.__dict__[n] for n in ("_forward_hooks", "_forward_pre_hooks")}
    states = save_rng(weight.device)
    try:
        backbone.__dict__["forward"] = give_hidden
        model.__dict__["_loss_function"] = stop
        for name in hooks:
            backbone.__dict__[name] = type(hooks[name])()
        with torch.no_grad(), replayed_rng(states, weight.device), torch.autocast(weight.device.type, enabled=False):
            type(model).forward(model, input_ids=labels, labels=labels)
        return "the model's forward does not call its loss function"
    except _Stop as reached:
        logits = reached.logits.float()
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        return f"the check of its head could not run ({type(error).__name__})"
    finally:
        for holder, name, value in ((backbone, "forward", saved[0]), (model, "_loss_function", saved[1])):
            if value is _MISSING:
                holder.__dict__.pop(name, None)
            else:
                holder.__dict__[name] = value
        backbone.__dict__.update(hooks)
    expected = nn.functional.cross_entropy(logits.view(5, -1), labels.view(-1), reduction="sum")
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        got = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=model.get_output_embeddings().bias,
            scale=rule.scale,
            softcap=rule.softcap,
        )
    difference = float((got.double() - expected.double()).abs() / expected.double().abs())
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 1e-2
    return "" if difference <= tolerance else f"the check of its head found the loss off by {difference:.1e}"


class _BackboneOutput(dict[str, Any]):
    """What a head reads of its backbone's output: the last hidden states, and ``None`` for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None
