"""AnchorAttention's results as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from hf_memeff.benchmarks.anchor_needle import DENSE, METHODS
from hf_memeff.benchmarks.anchor_op import SETTINGS
from hf_memeff.benchmarks.anchor_results import NeedleResult, OpResult, PeerResult, PrefillResult
from hf_memeff.benchmarks.anchor_rules import ANCHOR, TITLES
from hf_memeff.benchmarks.tables import NOT_MEASURED, table

SETTING_TITLES = {
    "calibrated": "calibrated for 0.95",
    "calibrated-0.9": "calibrated for 0.9",
    "theta-12": "theta 12 (default)",
}
METHOD_TITLES = {"dense": "dense (sdpa)", "anchor": "AnchorAttention, calibrated", "sinks-window": "sinks + window"}


def at_length(results: Iterable[OpResult], setting: str) -> dict[int, list[OpResult]]:
    """The layers of a setting by length, in order."""
    found: dict[int, list[OpResult]] = {}
    for result in sorted(results, key=lambda result: (result.tokens, result.layer)):
        if result.setting == setting:
            found.setdefault(result.tokens, []).append(result)
    return found


def op_speed(results: Sequence[OpResult]) -> float | None:
    """sdpa's time by AnchorAttention's over all layers, each the median of its rounds; None if one is not timed."""
    if not all(result.seconds for result in results):
        return None
    ours, dense = (
        sum(map(statistics.median, times))
        for times in ([r.seconds for r in results], [r.sdpa_seconds for r in results])
    )
    return dense / ours


def method_rows(ops: Sequence[OpResult], prefills: Sequence[PrefillResult]) -> list[list[str]]:
    """AnchorAttention's row of the table of all methods: the longest text whose whole prefill was timed, and the
    longest whose attention alone was; none if neither is there.
    """
    told = []
    if prefills:
        longest = max(prefills, key=lambda r: r.tokens)
        told.append(
            f"prefill of {longest.tokens} tokens {longest.speed:.2f}x as fast as sdpa, loss "
            f"{100 * longest.loss_change:+.1f} % ({longest.model})"
        )
    timed = {n: s for n, own in at_length(ops, SETTINGS[0]).items() if (s := op_speed(own)) is not None}
    if timed:
        told.append(f"its attention alone {timed[max(timed)]:.2f}x at {max(timed)} tokens")
    if not told:
        return []
    name = 'AnchorAttention (`attn_implementation="anchor"`)'
    return [[name, "trains densely; approximate in prefill", "-", "; ".join(told), "none"]]


def op_table(results: Sequence[OpResult]) -> str:
    """Speed, density, recall and error by length and setting, over the layers that were measured."""
    rows = []
    for setting in SETTINGS:
        for tokens, own in at_length(results, setting).items():
            speed = op_speed(own)
            temporaries = [r.temporary_bytes / r.q_bytes for r in own if r.temporary_bytes is not None]
            rows.append(
                [
                    str(tokens),
                    SETTING_TITLES[setting],
                    _layers(own),
                    "-" if speed is None else f"{speed:.2f}x",
                    f"{_mean(own, lambda r: r.density):.3f}",
                    f"{_mean(own, lambda r: r.recall):.3f}",
                    f"{min(r.recall for r in own):.3f}",
                    f"{min(r.recall_5th for r in own):.3f}",
                    f"{_mean(own, lambda r: r.output_error):.3f}",
                    f"{max(temporaries):.2f}" if temporaries else "-",
                ]
            )
    header = ["tokens", "thresholds", "layers", "speed against sdpa", "density", "recall", "least recall of a layer"]
    header += ["its least 5th percentile", "output error", "temporaries by q"]
    return table(header, rows) if rows else NOT_MEASURED


def op_layers_table(results: Sequence[OpResult], tokens: int) -> str:
    """The calibrated layers of one length, one by one."""
    rows = [
        [
            str(r.layer),
            "-" if r.time_ratio is None else f"{1 / r.time_ratio:.2f}x",
            f"{r.density:.3f}",
            f"{r.recall:.3f}",
            f"{r.recall_5th:.3f}",
            f"{r.output_error:.3f}",
        ]
        for r in at_length(results, SETTINGS[0]).get(tokens, [])
    ]
    header = [f"layer at {tokens} tokens", "speed against sdpa", "density", "recall", "5th percentile", "output error"]
    return table(header, rows) if rows else NOT_MEASURED


def prefill_table(results: Sequence[PrefillResult]) -> str:
    """Time and loss of whole prefills."""
    rows = [
        [
            str(r.tokens),
            str(len(r.seconds)),
            f"{statistics.median(r.dense_seconds):.1f}",
            f"{statistics.median(r.seconds):.1f}",
            f"{r.speed:.2f}x",
            f"{r.density:.3f}",
            f"{statistics.fmean(r.dense_losses):.4f}",
            f"{statistics.fmean(r.losses):.4f}",
            f"{100 * r.loss_change:+.2f} %",
        ]
        for r in sorted(results, key=lambda r: r.tokens)
    ]
    header = ["tokens", "texts", "sdpa, s", "AnchorAttention, s", "speed", "density", "dense loss", "loss", "change"]
    return table(header, rows) if rows else NOT_MEASURED


def needle_table(results: Sequence[NeedleResult]) -> str:
    """Questions answered, by length and method."""
    rows = []
    for tokens in sorted({r.tokens for r in results}):
        for r in sorted((r for r in results if r.tokens == tokens), key=lambda r: METHODS.index(r.method)):
            sparse = r.method != DENSE
            rows.append(
                [
                    str(tokens),
                    METHOD_TITLES[r.method],
                    f"{sum(r.hits)} of {len(r.hits)}",
                    f"{statistics.fmean(r.answer_losses):.3f}",
                    f"{max(r.densities):.3f}" if sparse else "-",
                    str(min(r.sparse_calls)) if sparse else "-",
                ]
            )
    header = ["tokens", "attention", "answers found", "loss of the answer", "highest density", "fewest sparse calls"]
    return table(header, rows) if rows else NOT_MEASURED


def peer_table(results: Sequence[PeerResult]) -> str:
    """Mean density over the layers that every rule was measured in, at AnchorAttention's own recall."""
    layers = complete_layers(results)
    own = [r for r in results if r.layer in layers]
    if not own:
        return NOT_MEASURED
    rows = []
    for method, title in TITLES.items():
        mine = [r for r in own if r.method == method]
        cells = []
        for index in range(len(mine[0].shifts)):
            density = statistics.fmean(r.densities[index] for r in mine)
            recall = statistics.fmean(r.recalls[index] for r in mine)
            far = sum(abs(r.recalls[index] - _wanted(own, r, index)) > 0.005 for r in mine)
            cells.append(f"{density:.3f} at {recall:.3f}" + (f" ({far} layers off by more than 0.005)" if far else ""))
        rows.append([title, *cells])
    header = [f"density at recall, {own[0].tokens} tokens"]
    return table([*header, *(f"thresholds {shift:+g}" if shift else "calibrated" for shift in own[0].shifts)], rows)


def complete_layers(results: Iterable[PeerResult]) -> list[int]:
    """The layers with a result of every rule."""
    methods: dict[int, set[str]] = {}
    for result in results:
        methods.setdefault(result.layer, set()).add(result.method)
    return sorted(layer for layer, found in methods.items() if found == set(TITLES))


def peer_note(results: Sequence[PeerResult]) -> str:
    """What the comparison of rules is taken over."""
    layers = complete_layers(results)
    if not layers:
        return NOT_MEASURED
    first = results[0]
    return (
        f"{first.model}, layers {', '.join(map(str, layers))}, all heads, {first.rows} rows at random; density is the "
        "attended share of all causal pairs; every rule but the calibrated one is tuned in each layer to that one's "
        "recall on the very text that is measured"
    )


def _wanted(results: Sequence[PeerResult], result: PeerResult, index: int) -> float:
    return next(r.recalls[index] for r in results if (r.layer, r.method) == (result.layer, ANCHOR))


def _mean(results: Sequence[OpResult], value: Callable[[OpResult], float]) -> float:
    return statistics.fmean(map(value, results))


def _layers(results: Sequence[OpResult]) -> str:
    layers = [result.layer for result in results]
    whole = len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
