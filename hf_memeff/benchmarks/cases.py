"""What is measured: models, lengths, ranks and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_memeff.blocks.causal_loss import automatic_tile_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEED = 0


@dataclass(frozen=True)
class ModelShape:
    """A model to measure on.

    Attributes:
        name: as on the command line and in the results.
        layers: decoder blocks.
        hidden_size: D.
        mlp_size: width of the MLP.
        heads: attention heads.
        key_value_heads: of them with keys and values of their own.
        vocabulary: classes of the head, which is tied to the embeddings.
        weights: "real", from `find_smollm2`, or "random".
    """

    name: str
    layers: int
    hidden_size: int
    mlp_size: int
    heads: int
    key_value_heads: int
    vocabulary: int
    weights: str = "random"

    @property
    def parameters(self) -> int:
        """Number of base weights."""
        key_value_size = self.hidden_size * self.key_value_heads // self.heads
        attention = 2 * self.hidden_size * (self.hidden_size + key_value_size)
        return self.vocabulary * self.hidden_size + self.layers * (attention + 3 * self.hidden_size * self.mlp_size)

    def build(self, dtype: torch.dtype, seed: int = SEED) -> Any:
        """A Qwen2 model of this shape with random weights, on the CPU."""
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            intermediate_size=self.mlp_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            tie_word_embeddings=True,
        )
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 49152, weights="real"),
        ModelShape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 151936),
        ModelShape("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 151936),
        ModelShape("tiny", 4, 64, 192, 4, 2, 1024),
    )
}
"""By name. "tiny" is for trying the benchmark itself."""


@dataclass(frozen=True)
class Case:
    """One sequence through one model.

    Attributes:
        model: key of `MODELS`.
        dtype: key of `DTYPES`. With bf16 the base weights are bfloat16, the adapter is float32, as PEFT makes it, and
            the step runs under autocast, as Trainer's bf16=True does.
        tokens: length of the sequence.
        rank: of the adapter on every linear layer of the blocks.
        rounds: timed rounds; 0 measures memory and gradients alone.
        resident: whether the resident memory of a fresh process is measured too.
        methods: methods to measure where the user names none; empty for all.
    """

    model: str
    dtype: str
    tokens: int
    rank: int
    rounds: int = 3
    resident: bool = False
    methods: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the case in the results."""
        return f"{self.model}/{self.dtype}/{self.tokens}/r{self.rank}"

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return MODELS[self.model]

    @property
    def loss_tile_bytes(self) -> int:
        """Size of the loss's tiles: MeSP's own choice, which the baselines' tiled loss gets too."""
        hidden = torch.empty(1, self.tokens, self.shape.hidden_size, dtype=DTYPES[self.dtype], device="meta")
        return automatic_tile_bytes(hidden)

    @property
    def needed_bytes(self) -> int:
        """Upper estimate of the memory for plain LoRA, which every method's gradients are compared with.

        Counted generously from a Llama block's graph: about 16 tensors of the width D and 6 of the MLP's per token and
        block, three times the logits, all in float32 where the reference runs; and the weights, twice for bf16.
        """
        shape = self.shape
        activations = shape.layers * (16 * shape.hidden_size + 6 * shape.mlp_size) + 3 * shape.vocabulary
        weights = shape.parameters * (4 if self.dtype == "fp32" else 6)
        return weights + 4 * self.tokens * activations


_CLOSEST = ("lora-checkpointing", "lora-checkpointing-tiled", "mesp", "mesp-disk")

# The most telling first, since a run may be interrupted. The sweep over length has every method as far as that takes
# minutes; elsewhere there are the closest ones.
DEFAULT_CASES = (
    Case("SmolLM2-135M", "fp32", 256, 8),
    Case("SmolLM2-135M", "fp32", 1024, 8, resident=True),
    Case("SmolLM2-135M", "fp32", 128, 8),
    Case("SmolLM2-135M", "fp32", 512, 8),
    Case("SmolLM2-135M", "fp32", 2048, 8, methods=_CLOSEST),
    *(Case("SmolLM2-135M", "fp32", 256, rank, methods=_CLOSEST) for rank in (4, 16, 32)),
    Case("SmolLM2-135M", "bf16", 256, 8, methods=_CLOSEST),
    Case("Qwen2.5-0.5B", "fp32", 256, 8, methods=_CLOSEST),
    Case("Qwen2.5-0.5B", "fp32", 1024, 8, methods=_CLOSEST),
    Case("Qwen2.5-1.5B", "fp32", 256, 8, rounds=0, methods=_CLOSEST),
)
QUICK_CASES = (Case("SmolLM2-135M", "fp32", 256, 8),)


def select_cases(
    *,
    quick: bool = False,
    models: Sequence[str] = (),
    lengths: Sequence[int] = (),
    ranks: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    rounds: int | None = None,
) -> list[Case]:
    """The cases that a command line asks for.

    Args:
        quick: one small case instead of the default ones.
        models, lengths, ranks, dtypes: with any of them, every combination is measured; what is not named is
            SmolLM2-135M, 256 tokens, rank 8 and fp32.
        rounds: timed rounds of each case instead of its own number.

    Returns:
        The cases, those of one model and dtype together.
    """
    if models or lengths or ranks or dtypes:
        cases: Iterable[Case] = (
            Case(model, dtype, tokens, rank)
            for model in models or ("SmolLM2-135M",)
            for dtype in dtypes or ("fp32",)
            for tokens in lengths or (256,)
            for rank in ranks or (8,)
        )
    else:
        cases = QUICK_CASES if quick else DEFAULT_CASES
    chosen = [case if rounds is None else replace(case, rounds=rounds) for case in cases]
    return sorted(dict.fromkeys(chosen), key=lambda case: (list(MODELS).index(case.model), case.dtype != "fp32"))


def load_base(shape: ModelShape, dtype: str, load_real: Callable[[torch.dtype], Any]) -> Any:
    """The base model of a case, on the CPU, in eval mode.

    Args:
        shape: which one.
        dtype: key of `DTYPES`.
        load_real: loads SmolLM2 in a dtype.
    """
    base = load_real(DTYPES[dtype]) if shape.weights == "real" else shape.build(DTYPES[dtype])
    return base.eval()
