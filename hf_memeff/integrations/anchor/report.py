"""What a model's attention layers did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, nn

from hf_memeff.integrations.anchor.calls import AttentionCall
from hf_memeff.integrations.anchor.running import run_observed
from hf_memeff.integrations.anchor.settings import LayerState, layer_states
from hf_memeff.ops.anchor.calibration import row_recall
from hf_memeff.ops.anchor.dispatch import DENSE_SHARES, backend_name


@dataclass(frozen=True)
class LayerReport:
    """One attention module.

    Attributes:
        name: of the module in the model.
        layer: index of its layer.
        sparse_calls: calls of which any head's superblock ran over kept keys.
        dense_calls: the others, by reason.
        candidates: candidate keys of the sparse calls, summed over heads and superblocks.
        kept: how many of them were attended.
        backend: what runs its sparse calls.
        dense_share: kept share above which a head's superblock is computed densely; inf is never.
        recall: share of attention mass that is kept, mean over rows, where it was asked for.
        recall_5th: 5th percentile over rows and heads of the same.
    """

    name: str
    layer: int
    sparse_calls: int
    dense_calls: dict[str, int]
    candidates: int
    kept: int
    backend: str
    dense_share: float
    recall: float | None = None
    recall_5th: float | None = None

    @property
    def density(self) -> float:
        """Share of the candidate keys that were attended; 1 where there were none."""
        return self.kept / self.candidates if self.candidates else 1.0


@dataclass(frozen=True)
class AnchorReport:
    """The report of ``anchor_report(model)``; ``print(report)`` shows it as a table.

    Attributes:
        layers: one entry per attention module that was called or has settings.
        implementations: attention implementation of each (sub-)model by its name, "" is the model itself.
    """

    layers: tuple[LayerReport, ...] = ()
    implementations: dict[str, str] = field(default_factory=dict)

    @property
    def sparse_calls(self) -> int:
        """Sparse calls of all layers."""
        return sum(layer.sparse_calls for layer in self.layers)

    @property
    def dense_calls(self) -> dict[str, int]:
        """Dense calls of all layers, by reason."""
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(layer.dense_calls)
        return dict(total)

    @property
    def density(self) -> float:
        """Share of all layers' candidate keys that were attended; 1 where there were none."""
        candidates = sum(layer.candidates for layer in self.layers)
        return sum(layer.kept for layer in self.layers) / candidates if candidates else 1.0

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.dense_calls.items()) or "none"
        lines = [f"anchor: {self.sparse_calls} sparse calls at density {self.density:.3f}; dense calls: {reasons}"]
        lines += [f"  {name or 'model'}: {kind}" for name, kind in self.implementations.items()]
        for layer in self.layers:
            dense = ", ".join(f"{count} x {reason}" for reason, count in layer.dense_calls.items()) or "0"
            recall = (
                "" if layer.recall is None else f", recall {layer.recall:.3f} (5th percentile {layer.recall_5th:.3f})"
            )
            lines.append(
                f"  {layer.name}: {layer.sparse_calls} sparse ({layer.backend}, density {layer.density:.3f}, dense "
                f"above {layer.dense_share:g}){recall}; dense: {dense}"
            )
        return "\n".join(lines)


def anchor_report(model: nn.Module, input_ids: Tensor | None = None) -> AnchorReport:
    """Per attention layer: calls, sparse or dense and why, density, and on request recall.

    Calls are counted since the last `set_anchor_config`. Calls inside a traced or exported program are not.

    Args:
        model: a transformers model, wrapped by PEFT or not.
        input_ids: (B, N), a text to measure recall on: one forward pass that is dense, for which each layer computes
            its attention twice more.

    Raises:
        ValueError: ``input_ids`` is no batch of token ids, or too short for a sparse call.
    """
    recalls: dict[int, Tensor] = {}

    def observe(call: AttentionCall, state: LayerState) -> None:
        thetas = state.config.head_thresholds(state.layer, call.query.shape[1])
        segments = call.segments or ()
        recall = row_recall(call.query, call.key, call.value, segments, thetas, state.config, call.scale)
        recalls[id(call.module)] = recall[~recall.isnan()]

    if input_ids is not None:
        run_observed(model, input_ids, observe)
        if not recalls:
            raise ValueError(
                f"got {input_ids.shape[-1]} tokens to measure recall on, expected enough for a sparse call. "
                "Fix: pass a longer text, or set a smaller min_length."
            )
    reports = []
    for name, module, state in layer_states(model):
        backend = backend_name(state.config, next(module.parameters(), None))
        recall = recalls.get(id(module))
        measured = () if recall is None else (recall.mean().item(), _percentile(recall, 0.05))
        reports.append(
            LayerReport(
                name,
                state.layer,
                state.sparse_calls,
                dict(state.dense_calls),
                state.candidates,
                state.kept,
                backend,
                state.config.dense_share(DENSE_SHARES[backend]),
                *measured,
            )
        )
    return AnchorReport(tuple(reports), implementations(model))


def implementations(model: nn.Module) -> dict[str, str]:
    """Attention implementation of every (sub-)model that has one of its own, by module name."""
    found: dict[str, str] = {}
    seen = set()
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        if kind is not None and id(config) not in seen and hasattr(module, "set_attn_implementation"):
            seen.add(id(config))
            found[name] = kind
    return found


def _percentile(values: Tensor, share: float) -> float:
    # torch.quantile refuses more than 2^24 elements
    return values.flatten().kthvalue(max(1, round(share * values.numel()))).values.item()
