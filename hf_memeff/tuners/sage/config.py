"""`SageConfig`: exactly LoRA's forward, a backward pass through the salient tokens of each block."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from hf_memeff.blocks.options import EngineOptions, SalientTokens
from hf_memeff.tuners.config import MemeffConfig
from hf_memeff.tuners.options import TRUE_OR_FALSE, option
from hf_memeff.tuners.rules import LARGEST_INTEGER, Rule, one_of


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1  # NaN compares false


def _is_one_of(value: Any, *names: str) -> bool:
    return isinstance(value, str) and value in names


def _is_integer(value: Any, lowest: int) -> bool:
    return type(value) is int and lowest <= value <= LARGEST_INTEGER


def _is_layers(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not all(_is_integer(layer, -LARGEST_INTEGER) for layer in value):
        return False
    return len(set(value)) == len(value)


@dataclass(kw_only=True)
class SageConfig(MemeffConfig):
    """Config of a LoRA adapter that trains through the salient tokens of each block (SAGE).

    The forward pass is exactly LoRA's. In each block the backward pass runs through a kept set T of tokens alone; past
    the block, the residual connection carries the gradient of every token. So gradients are approximate, unless
    `token_budget` is 1, where they are LoRA's and nothing is scored. Adapter and files are LoRA's. Every field of
    `LoraConfig` keeps its meaning and its place; the fields of this package are keyword-only.
    Source: "Forward Knows Efficient Backward Path: Saliency-Guided Memory-Efficient Fine-tuning of Large Language
    Models", ACL 2025 (long 459). Ours differ: q and k adapters receive their gradients, and the saliencies
    "gradient" and "random" are added.

    Example:
        ```python
        config = SageConfig(token_budget=0.25, r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        ```

    Raises:
        ValueError: a field is out of its range, or one of `REFUSED_VARIANTS` is set. On attaching: a layer of
            `dense_layers` that the model does not have, or a saliency that scores attention on a model whose attention
            can't be scored. A budget of 1 scores nothing and refuses nothing.
    """

    method: ClassVar[str] = "sage"
    title: ClassVar[str] = "SAGE"
    promise: ClassVar[str] = "LoRA with a backward pass through salient tokens"

    saliency: str = option(
        "attention",
        one_of("attention", "gradient", "value_norm", "random"),
        "How a block scores its tokens. 'attention': the attention that the rows of `query_rows` pay to them, known in"
        " the forward pass, so that only kept tokens are stored (least memory). Nothing tells it which tokens are "
        "predicted badly: it can diverge with learning rates that LoRA takes, and learnt less than 'random' at small "
        "budgets (README has the figures). 'gradient': the gradient that comes back to them, by itself and through "
        "attention: the best choice of tokens, which learns with LoRA's rates and needs no labels, but the block "
        "inputs of all tokens (MeSP's memory). 'value_norm': the size of their values, as in the authors' code, which "
        "is cheaper to score. 'random': a baseline, drawn for each call from its tokens and the state of PyTorch's "
        "generator, which stays as it is.",
    )
    token_budget: float | str = option(
        0.5,
        Rule(
            "a number above 0 and at most 1, or 'adaptive'",
            lambda value: _is_one_of(value, "adaptive") or _is_share(value),
        ),
        "Share of the tokens that each block's backward pass runs through. Smaller is faster, smaller in memory and "
        "coarser in its gradients: 1 is exactly LoRA, 0.5 a safe start. A step's arithmetic is about 1 + 2 x budget "
        "forward passes (LoRA 2, LoRA with gradient checkpointing 3). 'adaptive' keeps as many as hold "
        "`attention_mass` of the saliency, so that memory and time vary from step to step.",
    )
    attention_mass: float = option(
        0.8,
        Rule("a number above 0 and at most 1", _is_share),
        "Share of the saliency that the kept tokens hold together, for token_budget='adaptive'. Larger keeps more "
        "tokens; 0.8 is the authors' value.",
    )
    min_tokens: int = option(
        8,
        Rule("an integer from 1", lambda value: _is_integer(value, 1)),
        "Fewest tokens kept in a block, for token_budget='adaptive'. Raise it if short sequences learn badly; what "
        "exceeds the sequence's length is clamped with a warning.",
    )
    sink_tokens: int = option(
        4,
        Rule("an integer from 0", lambda value: _is_integer(value, 0)),
        "First real tokens of each sequence that are always kept, inside the budget. Most models park attention on "
        "them (attention sinks); 0 lets them compete with the others.",
    )
    keep_last: bool = option(
        True,
        TRUE_OR_FALSE,
        "Whether the last real token of each sequence is always kept, inside the budget. Where the model is "
        "asked for what follows; a causal LM's loss has no gradient there, so False frees a slot.",
    )
    dense_layers: tuple[int, ...] = option(
        (-1,),
        Rule("a tuple of integers without repetition", _is_layers),
        "Blocks that keep every token, counted from the end where negative. The last block, (-1,), is the authors' "
        "choice for generation; () is fastest; more layers give more exact gradients for more time and memory.",
    )
    backward_keys: str | None = option(
        None,
        Rule("'kept', 'all' or None", lambda value: value is None or _is_one_of(value, "kept", "all")),
        "Which keys the backward pass of attention sees. 'kept': the kept tokens' own, so that nothing of the full "
        "length is stored. 'all': every token's keys, for more exact gradients and up to about three times what a "
        "block stores. None: 'kept', but 'all' with saliency='gradient', which has the block's input at hand, so that "
        "all keys cost it no memory.",
    )
    query_rows: str | int = option(
        "labels",
        Rule(
            "'labels', 'last' or an integer from 1",
            lambda value: _is_one_of(value, "labels", "last") or _is_integer(value, 1),
        ),
        "Rows whose attention is scored, for saliency='attention'. 'labels': those that predict a label "
        "(the last row where the model gets no labels, as under label smoothing), 'last': the last real row alone "
        "(cheapest), a number: at most so many of those that predict a label, evenly spaced (bounds the cost of long "
        "answers).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dense_layers, list):  # as JSON and command lines have it
            self.dense_layers = tuple(self.dense_layers)
        for name in self._without_effect():
            warnings.warn(
                f"SageConfig got {name}={getattr(self, name)!r}, which has no effect with saliency={self.saliency!r} "
                f"and token_budget={self.token_budget!r}. Fix: leave {name} out.",
                stacklevel=3,
            )

    def validate(self) -> None:
        """Check the fields of this package.

        Raises:
            ValueError: a value is outside its fixed list or range, or an adaptive budget is to hold a share of scores
                that are random.
        """
        super().validate()
        if self.saliency == "random" and self.token_budget == "adaptive":
            raise ValueError(
                "SageConfig got token_budget='adaptive' with saliency='random', expected a number, since random scores "
                "say nothing of how many tokens matter. Fix: token_budget=0.5, or another saliency."
            )

    @property
    def effective_backward_keys(self) -> str:
        """What `backward_keys` stands for: None follows the saliency, and goes on to where that is changed."""
        if self.backward_keys is not None:
            return self.backward_keys
        return "all" if self.saliency == "gradient" else "kept"

    def engine_options(self) -> EngineOptions:
        """The fields of this package as the engine takes them."""
        values = {item.name: getattr(self, item.name) for item in fields(SalientTokens)}
        values["dense_layers"] = tuple(self.dense_layers)
        values["backward_keys"] = self.effective_backward_keys
        return dataclasses.replace(super().engine_options(), salient=SalientTokens(**values))

    def _without_effect(self) -> list[str]:
        """Names of fields that were set although the other fields leave them without effect."""
        idle = [] if self.token_budget == "adaptive" else ["attention_mass", "min_tokens"]
        if self.saliency != "attention":
            idle.append("query_rows")
        return [name for name in idle if getattr(self, name) != type(self).__dataclass_fields__[name].default]
