"""How each model family's decoder block is laid out.

A layout names the parts of a block and the order of its two residual steps; the attention between its projections
(rotary embedding, query and key norms, softcap, sinks, the kernel) is always the layer's own code. A layout is a claim:
the self-check tests it on the real layer before it is used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from hf_memeff.ops.norms import NormOp


@dataclass(frozen=True)
class Layout:
    """Names of the parts of a block, as attributes of the layer (dots reach into children).

    ``h1 = h + s drop(post_norm(output(attention(projections(input_norm(h))))))`` and ``y = h1 + s
    drop(post_norm(mlp(mlp_norm(h1))))``.

    Attributes:
        name: the family, as the status report shows it.
        attention: the attention module.
        projections: its input projections, fused or not, in the order PEFT calls them.
        output: its output projection.
        input_norm: norm before the attention; ``None`` where the block has none (post-norm).
        attention_out_norm: norm on the attention's output, before the residual; ``None`` where there is none.
        mlp_norm: norm before the MLP.
        mlp_out_norm: norm on the MLP's output.
        mlp: the MLP module.
        gate: its gate projection; ``None`` for a plain MLP or where ``up`` is fused.
        up: its up projection.
        down: its down projection.
        fused_gate: whether ``up`` computes gate and up at once, gate first.
        activation: attribute of the MLP that holds the activation.
        residual_scale: attribute of the layer that multiplies both branches.
        attention_dropout: dropout module behind the attention's output.
        mlp_dropout: dropout module behind the MLP's output.
    """

    name: str
    attention: str = "self_attn"
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    input_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    mlp: str = "mlp"
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    fused_gate: bool = False
    activation: str = "mlp.act_fn"
    residual_scale: str | None = None
    attention_dropout: str | None = None
    mlp_dropout: str | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """All projections in the order in which PEFT runs them (the order of its dropout masks)."""
        gate = (self.gate,) if self.gate else ()
        return (*self.projections, self.output, *gate, self.up, self.down)

    @property
    def norms(self) -> tuple[str, ...]:
        """All norms of the residual steps."""
        names = (self.input_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        return tuple(n for n in names if n is not None)

    @property
    def dropouts(self) -> tuple[str, ...]:
        """The residual dropouts."""
        return tuple(n for n in (self.attention_dropout, self.mlp_dropout) if n is not None)


_LLAMA = Layout("Llama")
_GEMMA2 = replace(
    _LLAMA,
    name="Gemma 2",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)

# By the class of the decoder layer. A class that is not here runs as whole-block recompute.
LAYOUTS: dict[str, Layout] = {
    "LlamaDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": replace(_LLAMA, name="Qwen2"),
    "Qwen3DecoderLayer": replace(_LLAMA, name="Qwen3"),
    "MistralDecoderLayer": replace(_LLAMA, name="Mistral"),
    "SmolLM3DecoderLayer": replace(_LLAMA, name="SmolLM3"),
    "Gemma2DecoderLayer": _GEMMA2,
    "Gemma3DecoderLayer": replace(_GEMMA2, name="Gemma 3 (text)"),
    "Phi3DecoderLayer": replace(
        _LLAMA,
        name="Phi-3",
        projections=("self_attn.qkv_proj",),
        gate=None,
        up="mlp.gate_up_proj",
        fused_gate=True,
        activation="mlp.activation_fn",
        attention_dropout="resid_attn_dropout",
        mlp_dropout="resid_mlp_dropout",
    ),
    "Olmo2DecoderLayer": replace(
        _LLAMA,
        name="OLMo-2",
        input_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
    ),
    "GraniteDecoderLayer": replace(_LLAMA, name="Granite", residual_scale="residual_multiplier"),
    "GPT2Block": Layout(
        "GPT-2",
        attention="attn",
        projections=("attn.c_attn",),
        output="attn.c_proj",
        input_norm="ln_1",
        mlp_norm="ln_2",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation="mlp.act",
        attention_dropout="attn.resid_dropout",
        mlp_dropout="mlp.dropout",
    ),
}


def layout_of(layer: nn.Module) -> Layout | None:
    """The layout of a decoder layer by its class or a base class of it, or ``None``."""
    for cls in type(layer).__mro__:
        if cls.__name__ in LAYOUTS:
            return LAYOUTS[cls.__name__]
    return None


def part(layer: nn.Module, name: str) -> nn.Module:
    """The part of a layer that a layout names."""
    return layer.get_submodule(name)


@dataclass(frozen=True)
class NormConvention:
    """What a norm module computes: fields as in ``NormOp``; weights and ``eps`` are read from the module."""

    kind: str
    offset: float = 0.0
    round_first: bool = True
    float32_statistics: bool = False


def norm_convention(norm: nn.Module) -> NormConvention | None:
    """Find a norm's convention by what it computes, on 3 random rows in bfloat16, float32 and float64.

    The weights are replaced for the probe alone, so that a weight of ones cannot hide the difference between ``w`` and
    ``1 + w``. ``None`` for anything that is neither LayerNorm nor one of the three RMSNorms.
    """
    if type(norm) is nn.LayerNorm:
        return NormConvention("layer") if len(norm.normalized_shape) == 1 else None
    weight = getattr(norm, "weight", None)
    if norm_eps(norm) is None or weight is None or weight.dim() != 1 or len(list(norm.parameters())) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    candidates = [
        NormConvention("rms", offset, first, narrow)
        for offset, first in ((0.0, True), (0.0, False), (1.0, False))
        for narrow in (True, False)
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        probe = torch.rand(weight.shape, generator=generator).to(dtype)
        x = torch.randn(3, *weight.shape, generator=generator).to(dtype)
        expected = _forward_with_weight(norm, probe, x)
        candidates = [c for c in candidates if _agrees(_norm_op(norm, probe, None, c).forward(x), expected)]
    return candidates[0] if candidates else None


@torch.no_grad()
def _forward_with_weight(norm: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """The norm's own forward with another weight, on a shallow copy that no hook of the real one sees."""
    shadow = norm.__new__(type(norm))
    shadow.__dict__ = norm.__dict__ | {"_parameters": {"weight": weight}}
    return type(norm).forward(shadow, x)


def _agrees(got: Tensor, expected: Tensor) -> bool:
    if expected.dtype != got.dtype:
        return False
    if got.dtype == torch.bfloat16:
        # one rounding more or less shows as a last bit in many elements; the right convention has it in almost none
        return bool((got != expected).float().mean() < 0.02)
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-13
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


def norm_eps(norm: nn.Module) -> float | None:
    """The epsilon of a norm module, whatever its attribute is called."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    return None


def _norm_op(norm: nn.Module, weight: Tensor | None, bias: Tensor | None, convention: NormConvention) -> NormOp:
    eps = norm_eps(norm)
    assert eps is not None
    return NormOp(weight=weight, bias=bias, eps=eps, **asdict(convention))


def norm_op(norm: nn.Module, convention: NormConvention) -> NormOp:
    """The op of a norm module whose convention is known."""
    return _norm_op(norm, getattr(norm, "weight", None), getattr(norm, "bias", None), convention)
