"""What the AnchorAttention benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from hf_memeff.benchmarks.comparison import paired_ratio
from hf_memeff.benchmarks.results import Environment


@dataclass(frozen=True)
class OpResult:
    """One layer's attention on real queries, keys and values.

    Attributes:
        model: name of the model.
        tokens: N, queries and keys.
        rope_factor: how far the model's positions are stretched for this length; 1 is not at all.
        layer: index of the layer.
        setting: "calibrated", or "theta-12", the default.
        step: blocks of a superblock.
        calibration_tokens: tokens that the thresholds are from, none of which is measured; None without calibration.
        path: "sparse", or why the call is dense: "short", or "kept share", which no head's superblock was under.
        density: share of the candidate keys that were attended; 1 without candidates.
        attended_share: share of all causal pairs of query and key that were attended, over the heads.
        recall: share of attention mass on attended keys, mean over heads and over the rows that have candidates (over
            all rows where none has).
        recall_5th: 5th percentile of the same.
        output_error: ``|o - o_dense| / |o_dense|`` over all heads and rows.
        temporary_bytes: most bytes alive in the call beyond q, k, v and the output, with the log-sum-exp and the list
            of kept keys; None where nothing can measure it.
        q_bytes: bytes of q.
        seconds: one entry per timed round.
        sdpa_seconds: torch's own attention in the same rounds.
        clock: what the seconds are.
        environment: what it was measured with.
    """

    model: str
    tokens: int
    rope_factor: float
    layer: int
    setting: str
    step: int
    calibration_tokens: int | None
    path: str
    density: float
    attended_share: float
    recall: float
    recall_5th: float
    output_error: float
    temporary_bytes: int | None
    q_bytes: int
    seconds: tuple[float, ...]
    sdpa_seconds: tuple[float, ...]
    clock: str
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        return op_key(self.tokens, self.layer, self.setting)

    @property
    def time_ratio(self) -> float | None:
        """Median over the rounds of the time by sdpa's in the same round; None if not timed."""
        return paired_ratio(self.seconds, self.sdpa_seconds) if self.seconds else None


def op_key(tokens: int, layer: int, setting: str) -> str:
    """Name of a layer's file."""
    return f"{tokens}-layer{layer:02}-{setting}"


@dataclass(frozen=True)
class PrefillResult:
    """A whole model's prefill of one text after another, each densely and with AnchorAttention.

    Attributes:
        model: name of the model.
        tokens: N.
        setting: as in `OpResult`.
        step: as in `OpResult`.
        calibration_tokens: as in `OpResult`.
        density: share of the candidate keys that were attended, over the layers and texts.
        sparse_calls: of all layers and texts.
        losses: mean next-token cross-entropy of each text.
        dense_losses: the same under sdpa.
        seconds: time of each text's prefill, from token ids to the last hidden states and the filled cache.
        dense_seconds: the same under sdpa.
        clock: what the seconds are.
        environment: what it was measured with.
    """

    model: str
    tokens: int
    setting: str
    step: int
    calibration_tokens: int | None
    density: float
    sparse_calls: int
    losses: tuple[float, ...]
    dense_losses: tuple[float, ...]
    seconds: tuple[float, ...]
    dense_seconds: tuple[float, ...]
    clock: str
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.tokens}-{self.setting}"

    @property
    def speed(self) -> float:
        """Median over the texts of the dense time by this one."""
        return paired_ratio(self.dense_seconds, self.seconds)

    @property
    def loss_change(self) -> float:
        """Loss by dense loss, over all texts, minus 1."""
        return sum(self.losses) / sum(self.dense_losses) - 1


@dataclass(frozen=True)
class NeedleResult:
    """Several facts hidden in one long text, and what a model says when it is asked for each.

    Attributes:
        model: name of the model.
        tokens: length of text and question together, up to the question's own length.
        method: "dense", "anchor" or "sinks-window".
        step: as in `OpResult`; None for "dense".
        calibration_tokens: as in `OpResult`.
        questions: what was asked, one per cell.
        depths: where the needle is, 0 is the start of the text.
        expected: the right answers.
        answers: what the model wrote, greedily.
        answer_losses: mean cross-entropy of the right answer's tokens, which tells answers apart that both fail.
        densities: share of the candidate keys that were attended, in the text and the questions so far; 1 for "dense".
        sparse_calls: of all layers, in the text and the questions so far.
        environment: what it was measured with.
    """

    model: str
    tokens: int
    method: str
    step: int | None
    calibration_tokens: int | None
    questions: tuple[str, ...]
    depths: tuple[float, ...]
    expected: tuple[str, ...]
    answers: tuple[str, ...]
    answer_losses: tuple[float, ...]
    densities: tuple[float, ...]
    sparse_calls: tuple[int, ...]
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.tokens}-{self.method}"

    @property
    def hits(self) -> tuple[bool, ...]:
        """Whether each answer contains the right one."""
        return tuple(right in answer for right, answer in zip(self.expected, self.answers, strict=True))


@dataclass(frozen=True)
class PeerResult:
    """How many keys one selection rule needs in one layer for the recall that AnchorAttention reaches there.

    Attributes:
        model: name of the model.
        tokens: N.
        layer: index of the layer.
        method: key of the rule; "anchor" has calibrated thresholds and is not tuned, the others are tuned to its
            recall on the very tokens that are measured.
        shifts: logits added to all calibrated thresholds, 0 among them; the next four have an entry for each.
        parameters: value of the rule's main parameter; the shift itself for "anchor".
        variants: fixed settings of the rule with which it needed the fewest keys.
        recalls: share of attention mass on attended keys, mean over heads and rows.
        densities: attended share of all causal pairs of query and key.
        rows: rows that both are taken over, drawn at random.
        calibration_tokens: as in `OpResult`.
        environment: what it was measured with.
    """

    model: str
    tokens: int
    layer: int
    method: str
    shifts: tuple[float, ...]
    parameters: tuple[float, ...]
    variants: tuple[str, ...]
    recalls: tuple[float, ...]
    densities: tuple[float, ...]
    rows: int
    calibration_tokens: int
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        return peer_key(self.tokens, self.layer, self.method)


def peer_key(tokens: int, layer: int, method: str) -> str:
    """Name of a rule's file."""
    return f"{tokens}-layer{layer:02}-{method}"


@dataclass(frozen=True)
class HeatResult:
    """One head's attention, averaged over squares of queries and keys, and the keys that it keeps.

    Attributes:
        model: name of the model.
        tokens: N.
        layer: index of the layer.
        head: query head.
        cells: side of both maps; a cell is tokens / cells rows and keys.
        mass: (cells * cells), row by row: mean attention mass of a row of the cell, base-10 logarithm, at least -9.
        kept: the same of the attended share of the cell's causal pairs.
        environment: what it was measured with.
    """

    model: str
    tokens: int
    layer: int
    head: int
    cells: int
    mass: tuple[float, ...]
    kept: tuple[float, ...]
    environment: Environment

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.tokens}-layer{self.layer:02}-head{self.head}"
