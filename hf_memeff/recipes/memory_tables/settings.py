"""What the memory tables can be told: the keys of their YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_memeff.benchmarks.cases import MODELS, ModelShape
from hf_memeff.recipes.errors import RecipeError, require_packages

SHAPES = {
    **{name: MODELS[name] for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B")},
    "Qwen2.5-3B": ModelShape("Qwen2.5-3B", 36, 2048, 11008, 16, 2, 151936),
    "tiny": MODELS["tiny"],
}
"""By name. "tiny" is for trying the recipe itself."""

PAPER_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B")

PRECISIONS = ("nf4", "fp32")
"""The paper's setting, base weights in 4 bits under bfloat16 with LoRA in bfloat16; and float32 throughout."""

PRODUCTS = ("computed", "skipped")


def _key(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class TableSettings:
    """What to measure; see each field's help.

    Raises:
        RecipeError: a value is out of range, or names what is not there.
    """

    output_dir: str = _key("mesp_memory_tables", "Folder for the tables and the results.")
    models: list[str] = field(
        default_factory=lambda: list(PAPER_MODELS),
        metadata={"help": f"Models of the first table, of {', '.join(SHAPES)}."},
    )
    lengths: list[int] = field(
        default_factory=lambda: [128, 256, 512, 1024],
        metadata={"help": "Tokens of the second table, on the first model."},
    )
    ranks: list[int] = field(
        default_factory=lambda: [4, 8, 16, 32], metadata={"help": "Ranks of the third table, on the first model."}
    )
    tokens: int = _key(256, "Tokens in the first and the third table.")
    rank: int = _key(8, "Rank in the first and the second table.")
    precisions: list[str] = field(
        default_factory=lambda: list(PRECISIONS), metadata={"help": f"Of {', '.join(PRECISIONS)}."}
    )
    layers: int = _key(0, "First so many decoder blocks of each model. 0: all.")
    mlp_tile_tokens: int = _key(0, "MeSP's option: rows of one tile of a block. 0: its own choice, 256 at least.")
    device: str | None = _key(None, "cpu or cuda. None: cuda if there is one and products are computed.")
    products: str = _key(
        "computed",
        "'skipped' leaves out the arithmetic of matrix products and attention, on a CPU: every tensor is allocated and "
        "freed as in a real step, and holds zeros. Memory comes out the same in a fraction of the time.",
        choices=PRODUCTS,
    )
    rounds: int = _key(0, "Timed steps per method, after the one whose memory is measured; 0 for memory alone.")
    draws: int = _key(20, "Directions for the cosine of MeZO's estimate to the gradient; 0 leaves it out.")
    cosine_layers: int = _key(2, "Decoder blocks of the first model for that cosine, which is computed in float32.")
    cosine_tokens: int = _key(64, "Tokens for that cosine.")
    seed: int = _key(0, "Of weights, adapters, tokens and directions.")

    def __post_init__(self) -> None:
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() and self.products == "computed" else "cpu"
        for name in ("models", "precisions"):
            if not getattr(self, name):
                raise RecipeError(f"Got {name} without an entry, expected one or more. Fix: leave it out for all.")
        for name, values, allowed in (
            ("models", self.models, SHAPES),
            ("precisions", self.precisions, PRECISIONS),
            ("products", [self.products], PRODUCTS),
            ("device", [self.device], ("cpu", "cuda")),
        ):
            for value in values:
                if value not in allowed:
                    raise RecipeError(
                        f"Got {name}: {value}, expected one of {', '.join(allowed)}. Fix: pass one of these."
                    )
        smallest = {
            "layers": 0,
            "mlp_tile_tokens": 0,
            "tokens": 2,
            "rank": 1,
            "rounds": 0,
            "draws": 0,
            "cosine_layers": 1,
            "cosine_tokens": 2,
        }
        numbers = [(name, getattr(self, name), least) for name, least in smallest.items()]
        numbers += [("lengths", value, 2) for value in self.lengths] + [("ranks", value, 1) for value in self.ranks]
        for name, value, least in numbers:
            if value < least:
                raise RecipeError(f"Got {name}: {value}, expected at least {least}. Fix: leave it out for the default.")
        if self.draws == 1:
            raise RecipeError("Got draws: 1, expected 0 or at least 2. Fix: leave it out for 20.")
        if self.products == "skipped" and (self.device != "cpu" or self.rounds):
            raise RecipeError(
                f"Got products: skipped with device: {self.device} and rounds: {self.rounds}, expected cpu and 0: "
                "a step without arithmetic has no time. Fix: leave products out."
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RecipeError("Got device: cuda, expected a device of this machine. Fix: device: cpu.")
        if "nf4" in self.precisions:
            require_packages("quant", "bitsandbytes")
