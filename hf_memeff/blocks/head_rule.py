"""What a causal LM makes of its head's output, read from its config and proven on random hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memeff.ops.dropout import replayed_rng, save_rng
from hf_memeff.ops.precision import accumulation_dtype

_MISSING = object()

# Root mean squares of the probe's raw logits, one row each. Small logits show a wrong scale, which a softcap hides in
# large ones; large logits show a softcap, which is the identity on small ones.
_PROBE_SIZES = (0.1, 1.0, 10.0, 100.0)

# Largest |own - rule| / |own| of a row (2-norms). A model rounds after each of at most four steps (scale, division,
# tanh, product), the rule in float32: that is 3e-3 in bfloat16, 6e-4 in float16 and 1e-7 in float32, as measured on
# heads of 16 to 5,000 classes. The limits are 3 times that and more, and half of what a scale off by 2% is.
_TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class HeadRule:
    """What a model does to ``lm_head``'s output z: ``softcap tanh(scale z / softcap)``, or ``scale z``.

    Attributes:
        scale: multiplies the raw logits.
        softcap: bound of the logits; ``None`` without one.
    """

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, raw: Tensor) -> Tensor:
        """The model's logits (..., V) from the head's output ``raw`` (..., V), in its dtype."""
        if self.scale != 1.0:
            raw = raw * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap


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
    """Prove the head rule: compare the model's own logits of random hidden states with the rule's.

    The hidden states go through the model's own head path without its blocks, as four rows whose raw logits are of
    different sizes. The backbone's forward is replaced on the instance for this one call; random state, modes and
    gradients stay as they are.

    Args:
        model: a causal language model whose head is a plain linear layer.
        rule: what ``head_rule`` read from its config.

    Returns:
        Why the rule cannot be used, or an empty string.
    """
    head = model.get_output_embeddings()
    hidden = _probe(head)
    own = _own_logits(model, hidden)
    if isinstance(own, str):
        return own
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        raw = nn.functional.linear(hidden, head.weight, head.bias)
        expected = rule.logits(_wide(raw))
    if own.shape != expected.shape:
        return f"the check of its head found logits of shape {tuple(own.shape)} instead of {tuple(expected.shape)}"
    worst = float(((expected - _wide(own)).norm(dim=-1) / _wide(own).norm(dim=-1)).max())
    tolerance = _TOLERANCES.get(hidden.dtype, _TOLERANCE)
    # not "worst > tolerance": NaN, of a head whose logits are all zero or not finite, proves nothing
    return "" if worst <= tolerance else f"the check of its head found logits off by {worst:.1e} of their size"


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _probe(head: nn.Linear) -> Tensor:
    """Random hidden states (1, 4, D) in the dtype of the head's weight, scaled to ``_PROBE_SIZES``."""
    weight = head.weight
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor(_PROBE_SIZES, device=weight.device)[:, None]
    hidden = torch.randn(1, len(sizes), weight.shape[-1], generator=generator).to(weight.device)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        raw = _wide(nn.functional.linear(hidden.to(weight.dtype), weight))
    rms = raw.square().mean(-1, keepdim=True).sqrt()
    return (hidden * (sizes / rms)).to(weight.dtype)


def _own_logits(model: Any, hidden: Tensor) -> Tensor | str:
    """What the model makes of the hidden states (1, T, D) behind its backbone: (1, T, V), or why that failed."""
    backbone = model.base_model
    if backbone is model:
        return "the model has no separate backbone"
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)

    def give_hidden(*_: Any, **__: Any) -> Any:
        return _BackboneOutput(hidden)

    def stop(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        raise _Stop(logits)

    saved = backbone.__dict__.get("forward", _MISSING), model.__dict__.get("_loss_function", _MISSING)
    hooks = {n: backbone.__dict__[n] for n in ("_forward_hooks", "_forward_pre_hooks")}
    states = save_rng(hidden.device)
    try:
        backbone.__dict__["forward"] = give_hidden
        model.__dict__["_loss_function"] = stop
        for name in hooks:
            backbone.__dict__[name] = type(hooks[name])()
        with torch.no_grad(), replayed_rng(states, hidden.device), torch.autocast(hidden.device.type, enabled=False):
            type(model).forward(model, input_ids=labels, labels=labels)
        return "the model's forward does not call its loss function"
    except _Stop as reached:
        return reached.logits
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        return f"the check of its head could not run ({type(error).__name__})"
    finally:
        for holder, name, value in ((backbone, "forward", saved[0]), (model, "_loss_function", saved[1])):
            if value is _MISSING:
                holder.__dict__.pop(name, None)
            else:
                holder.__dict__[name] = value
        backbone.__dict__.update(hooks)


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
