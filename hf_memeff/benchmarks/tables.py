"""Results as Markdown: the content of README's marked blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hf_memeff.benchmarks.methods import METHODS, TIME_REFERENCE
from hf_memeff.benchmarks.results import FamilyResult, MethodResult

NOT_MEASURED = "not measured yet"
NEVER_ON_A_GPU = "never run on a GPU yet"

_TILED_REFERENCE = TIME_REFERENCE + "-tiled"
_HEADLINE_TOKENS = 1024
_ENOUGH_ROUNDS = 3


def length_sweep(results: Sequence[MethodResult]) -> list[MethodResult]:
    """The results of the model, dtype, rank and device with the most lengths; one length is no sweep."""
    lengths: dict[tuple[str, str, int, str], set[int]] = {}
    for result in results:
        lengths.setdefault(_setting(result), set()).add(result.tokens)
    chosen = max(lengths, key=lambda setting: len(lengths[setting]), default=None)
    if chosen is None or len(lengths[chosen]) < 2:
        return []
    return [result for result in results if _setting(result) == chosen]


def _setting(result: MethodResult) -> tuple[str, str, int, str]:
    return result.model, result.dtype, result.rank, result.device


def steady_ratio(result: MethodResult) -> float | None:
    """The time ratio if it is the median of enough rounds to be more than chance; None otherwise."""
    return result.time_ratio if len(result.step_seconds) >= _ENOUGH_ROUNDS else None


def peak_table(results: Sequence[MethodResult]) -> str:
    """Peak memory by method and length, with each method's largest gradient error."""
    return _by_method(length_sweep(results), "peak, MiB", _mebibytes, with_error=True)


def time_table(results: Sequence[MethodResult]) -> str:
    """Step time by method and length, as a ratio to checkpointing."""
    timed = [result for result in length_sweep(results) if steady_ratio(result) is not None]
    return _by_method(timed, "step time", _ratio)


def other_cases_table(results: Sequence[MethodResult]) -> str:
    """MeSP on all that is not in the sweep over length: other ranks, dtypes and models."""
    sweep = length_sweep(results)
    rows = []
    for case in dict.fromkeys(result.case for result in results if result not in sweep):
        own = {result.method: result for result in results if result.case == case}
        if "mesp" not in own:
            continue
        mesp = own["mesp"]
        names = (TIME_REFERENCE, _TILED_REFERENCE, "mesp", "mesp-disk")
        rows.append(
            [
                f"{mesp.model} ({mesp.weights} weights)",
                mesp.dtype,
                str(mesp.tokens),
                str(mesp.rank),
                *(_mebibytes(own.get(name)) for name in names),
                _ratio(mesp),
                _error(mesp.gradient_error),
            ]
        )
    titles = [METHODS[name].title for name in (TIME_REFERENCE, _TILED_REFERENCE, "mesp", "mesp-disk")]
    header = ["model", "dtype", "tokens", "rank", *(f"{title}, MiB" for title in titles), "MeSP's time", "MeSP's error"]
    return table(header, rows) if rows else NOT_MEASURED


def methods_table(results: Sequence[MethodResult], others: Sequence[Sequence[str]] = ()) -> str:
    """What each of this package's methods saves, costs and promises: MeSP, and the rows of ``others``."""
    mesp = _headline(results, "mesp")
    if mesp is None:
        return NOT_MEASURED
    errors = [
        result.gradient_error for result in results if result.method.startswith("mesp") and result.dtype == "fp32"
    ]
    timed = [r for r in length_sweep(results) if r.method == "mesp" and steady_ratio(r) is not None]
    longest = max(timed, key=lambda result: result.tokens, default=None)
    saves = [
        f"{share} of {METHODS[name].title}"
        for name in ("lora", TIME_REFERENCE, _TILED_REFERENCE)
        if (share := _share(mesp, _headline(results, name))) is not None
    ]
    return table(
        ["method", "gradients", "peak memory", "step time", "saved adapter"],
        [
            [
                "MeSP (`MespConfig`)",
                f"LoRA's; largest fp32 error measured: {_error(max(errors))}",
                f"{', '.join(saves)} ({mesp.model}, {mesp.tokens} tokens)",
                f"{_ratio(longest)} of {METHODS[TIME_REFERENCE].title} ({longest.tokens} tokens)"
                if longest
                else NOT_MEASURED,
                "plain LoRA",
            ],
            *others,
        ],
    )


def disk_sentence(results: Sequence[MethodResult]) -> str:
    """What the disk store leaves in memory, by the meter and by the operating system."""
    disk, tiled = _headline(results, "mesp-disk"), _headline(results, _TILED_REFERENCE)
    if disk is None or tiled is None or (share := _share(disk, tiled)) is None:
        return NOT_MEASURED
    text = f"{share} of {METHODS[_TILED_REFERENCE].title} at {disk.tokens} tokens by the allocator's meter"
    if disk.resident_bytes is not None and tiled.resident_bytes:
        text += (
            f"; as growth of anonymous and shared resident memory of a fresh process "
            f"{disk.resident_bytes / 2**20:.0f} against {tiled.resident_bytes / 2**20:.0f} MiB, "
            f"{100 * disk.resident_bytes / tiled.resident_bytes:.0f} %"
        )
    return text


def measured_on(results: Iterable[Any]) -> str:
    """Machines, versions, commits and days of results, most frequent first."""
    counts = Counter(
        (
            result.environment.hardware(),
            ", ".join(f"{name} {version}" for name, version in result.environment.versions.items()),
        )
        for result in results
    )
    if not counts:
        return NOT_MEASURED
    days = sorted({result.environment.date for result in results})
    commits = sorted({result.environment.commit or "unknown" for result in results})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    machines = "; ".join(f"{hardware}; {versions}" for (hardware, versions), _ in counts.most_common())
    return f"{machines}; {when}, commit {', '.join(commits)}"


def support_matrix(results: Sequence[FamilyResult]) -> str:
    """Path and exactness of every block layout."""
    rows = [
        [
            result.family,
            f"`{result.layer}`",
            result.path + (f" ({result.reason})" if result.reason else ""),
            _error(result.fp64_error),
            _error(result.fp32_error),
        ]
        for result in results
    ]
    header = ["family", "decoder layer", "path of its blocks", "error in fp64", "error in fp32"]
    return table(header, rows) if rows else NOT_MEASURED


def gpu_note(results: Sequence[MethodResult], method: str | None = None) -> str:
    """Whether a feature has been run on a GPU: where a result of a method (any, if None) says so."""
    names = {r.environment.gpu for r in results if r.environment.gpu and method in (None, r.method)}
    return f"measured on {', '.join(sorted(names))}" if names else NEVER_ON_A_GPU


def _headline(results: Sequence[MethodResult], method: str) -> MethodResult | None:
    """A method's result in the sweep at 1024 tokens, or at the greatest length that was measured."""
    sweep = length_sweep(results)
    lengths = _lengths(sweep)
    if not lengths:
        return None
    tokens = _HEADLINE_TOKENS if _HEADLINE_TOKENS in lengths else lengths[-1]
    return _at([result for result in sweep if result.method == method], tokens)


def _lengths(results: Iterable[MethodResult]) -> list[int]:
    return sorted({result.tokens for result in results})


def _at(results: Iterable[MethodResult], tokens: int) -> MethodResult | None:
    return next((result for result in results if result.tokens == tokens), None)


def _share(part: MethodResult, whole: MethodResult | None) -> str | None:
    if whole is None or part.peak_bytes is None or not whole.peak_bytes:
        return None
    return f"{100 * part.peak_bytes / whole.peak_bytes:.0f} %"


def _mebibytes(result: MethodResult | None) -> str:
    return "-" if result is None or result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.1f}"


def _ratio(result: MethodResult | None) -> str:
    ratio = None if result is None else steady_ratio(result)
    return "-" if ratio is None else f"{ratio:.2f}"


def _error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _by_method(
    results: Sequence[MethodResult],
    corner: str,
    cell: Callable[[MethodResult | None], str],
    *,
    with_error: bool = False,
) -> str:
    """One row per method, one column per length."""
    lengths = _lengths(results)
    rows = []
    for name, method in METHODS.items():
        own = [result for result in results if result.method == name]
        if not own:
            continue
        row = [method.title, *(cell(_at(own, tokens)) for tokens in lengths)]
        rows.append([*row, _error(max(result.gradient_error for result in own))] if with_error else row)
    header = [corner, *(f"{tokens} tokens" for tokens in lengths), *(["gradient error"] if with_error else [])]
    return table(header, rows) if rows else NOT_MEASURED


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
