"""What runs on which path, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PathReport:
    """One block, one linear layer, or the loss.

    Attributes:
        name: module name.
        path: blocks: ``structured``, ``recompute`` or ``off``. Linears: ``structured``, ``lean`` or ``peft``. Loss:
            ``tiled`` or ``logits``.
        reason: why it is not on the first of these; empty if it is.
    """

    name: str
    path: str
    reason: str = ""


@dataclass(frozen=True)
class MemeffStatus:
    """The report of ``memeff_status(model)``; ``print(status)`` shows it as a table.

    Attributes:
        attached: whether the engine is on the model at all.
        blocks: one entry per attached decoder block.
        linears: one entry per adapted linear layer.
        tiled_loss: how the causal loss of a training step is computed.
        activation_store: where block inputs wait for backward.
        notes: what one should know besides.
    """

    attached: bool
    blocks: tuple[PathReport, ...] = ()
    linears: tuple[PathReport, ...] = ()
    tiled_loss: PathReport = field(default_factory=lambda: PathReport("loss", "logits", "the engine is not attached"))
    activation_store: str = "memory"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.attached:
            return "hf_memeff: not attached to this model"
        lines = [f"hf_memeff: {len(self.blocks)} blocks, activation store {self.activation_store}"]
        for title, reports in (("blocks", self.blocks), ("linears", self.linears), ("loss", (self.tiled_loss,))):
            counts = Counter((r.path, r.reason) for r in reports)
            for (path, reason), count in counts.most_common():
                lines.append(f"  {title:<8} {count:>4} x {path:<11} {reason}".rstrip())
        lines += [f"  note     {note}" for note in self.notes]
        return "\n".join(lines)
