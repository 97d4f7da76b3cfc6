"""The memory tables as Markdown, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_memeff.recipes.memory_tables.methods import METHODS, SWEPT
from hf_memeff.recipes.memory_tables.paper import PAPER, PaperCase
from hf_memeff.recipes.memory_tables.results import CosineFigure, MemoryFigure
from hf_memeff.recipes.mezo import PAPER_COSINE

_MB = 1e6
_TITLES = {
    "nf4": "4-bit base (NF4), LoRA and all else in bfloat16: the paper's setting",
    "fp32": "float32 throughout",
}

METERS = """\
Where the meters differ: ours counts what PyTorch's allocator hands out during one step (forward, backward, SGD) above
weights, adapter and the adapter's gradients, so that every byte is an activation, a gradient of one, or a temporary.
The paper's megabytes come from its own framework, devices and meter; they are no sum of the same things. Its figures
for MeSP are below what a 4-bit model of that size takes, so they cannot contain the weights whole, and they are some
times what the tensors of a step add up to here. Ours contain the copy of a linear layer's weight in bfloat16 that
bitsandbytes makes for each product on a CPU, which fused kernels do not make. Compare the columns with one another,
and their course along length and rank; do not compare our megabytes with the paper's.
"""


def render(figures: Sequence[MemoryFigure], cosine: CosineFigure | None) -> str:
    """The three tables for each precision, the ablation of h, the cosine, and what to make of the paper's figures.

    Args:
        figures: of any cases; those of a table are chosen from them.
        cosine: of MeZO's estimate; None leaves it out.
    """
    parts = []
    for precision in dict.fromkeys(figure.precision for figure in figures):
        own = [figure for figure in figures if figure.precision == precision]
        parts += [f"## {_TITLES[precision]}", _conditions(own), *_tables(own)]
    parts.append(METERS.strip())
    if cosine is not None:
        parts.append(_cosine(cosine))
    return "\n\n".join(parts)


def _conditions(own: Sequence[MemoryFigure]) -> str:
    first = own[0]
    less = sorted({f"{f.model}: {f.layers} of {f.layers_of_model}" for f in own if f.layers < f.layers_of_model})
    text = (
        f"Peak of a step above weights, adapter and its gradients, in MB (10^6 bytes); batch 1, SGD 1e-4. Meter: "
        f"{first.meter}. Machine: {first.environment.hardware()}."
    )
    if less:
        text += f" Fewer blocks than the models have ({'; '.join(less)}): the paper's figures are for all of them."
    if first.mlp_tile_tokens:
        text += f" MeSP with mlp_tile_tokens={first.mlp_tile_tokens}, less than its own choice."
    if first.products == "skipped":
        text += " Matrix products and attention were allocated, not computed."
    return text


def _tables(own: Sequence[MemoryFigure]) -> list[str]:
    """Tables by model, length and rank; one that has a single row is left out where the first has it too."""
    common = [figure for figure in own if figure.method == "lora"]  # measured in the first table alone
    tokens, rank = common[0].tokens, common[0].rank
    models = [figure for figure in own if (figure.tokens, figure.rank) == (tokens, rank)]
    first = common[0].model
    lengths = [figure for figure in own if figure.rank == rank and figure.model == first]
    ranks = [figure for figure in own if figure.tokens == tokens and figure.model == first]
    tables = [
        f"### By model ({tokens} tokens, rank {rank})",
        _table("model", models, list(METHODS), lambda figure: figure.model),
        f"### By length ({first}, rank {rank})",
        _table("tokens", lengths, SWEPT, lambda figure: figure.tokens),
        f"### By rank ({first}, {tokens} tokens)",
        _table("rank", ranks, SWEPT, lambda figure: figure.rank),
        "### h = x A^T stored or computed again",
        _ablation(models),
    ]
    if any(figure.seconds is not None for figure in own):
        timed = _table("model", models, list(METHODS), lambda figure: figure.model, in_seconds=True)
        tables += ["### Seconds of a step, by model", timed]
    return tables


def _table(
    what: str,
    figures: Sequence[MemoryFigure],
    methods: Sequence[str],
    key: Callable[[MemoryFigure], str | int],
    *,
    in_seconds: bool = False,
) -> str:
    """One row per key, one column per method, then the paper's two methods."""
    head = [what, *(METHODS[method].title for method in methods)]
    head += ["MeSP / MeBP", "paper: MeBP", "paper: MeSP", "paper: MeSP / MeBP"]
    rows = []
    for value in sorted({key(figure) for figure in figures}):
        own = {figure.method: figure for figure in figures if key(figure) == value}
        numbers = {name: f.seconds if in_seconds else _megabytes(f) for name, f in own.items()}
        case = PaperCase(own["mesp"].model, own["mesp"].tokens, own["mesp"].rank)
        published = [PAPER.get((name, case)) for name in ("mebp", "mesp")]
        theirs = [None if p is None else p.seconds if in_seconds else p.megabytes for p in published]
        cells = [_cell(numbers.get(name), in_seconds) for name in methods]
        cells += [_ratio(numbers["mesp"], numbers["mebp"]), *(_cell(t, in_seconds) for t in theirs)]
        rows.append([str(value), *cells, _ratio(theirs[1], theirs[0])])
    return _markdown(head, rows)


def _ablation(figures: Sequence[MemoryFigure]) -> str:
    head = ["model", "computed again, MB", "stored, MB", "all h, MB", "computing all h once, s"]
    head += ["paper: computed again, MB", "paper: stored, MB"]
    rows = []
    for model in dict.fromkeys(figure.model for figure in figures):
        own = {figure.method: figure for figure in figures if figure.model == model}
        mesp, stored = own["mesp"], own["mesp-h"]
        case = PaperCase(mesp.model, mesp.tokens, mesp.rank)
        theirs = [PAPER[name, case].megabytes if (name, case) in PAPER else None for name in ("mesp", "mesp-h")]
        seconds = "not timed" if mesp.h_seconds is None else f"{mesp.h_seconds:.2g}"
        cells = [_cell(_megabytes(mesp)), _cell(_megabytes(stored)), f"{mesp.h_bytes / _MB:.2f}", seconds]
        rows.append([model, *cells, *(_cell(value) for value in theirs)])
    note = (
        "Stored: MeSP with tensors of h's shapes held from each block's forward to the end of the step; nothing reads "
        "them. This package has no option to store h: it would cost this much and save this little."
    )
    return f"{_markdown(head, rows)}\n\n{note}"


def _cosine(found: CosineFigure) -> str:
    return (
        f"Cosine of MeZO's gradient estimate to the exact gradient: {found.mean:.2g} +- {found.standard_error:.1g} "
        f"(mean and standard error over {found.draws} directions; {found.model}, {found.layers} blocks, float32, "
        f"{found.tokens} tokens, rank {found.rank}, {found.parameters:,} trained numbers, epsilon {found.epsilon:g}). "
        f"The paper: about {PAPER_COSINE}. Exact slopes along random directions would give sqrt(2 / (pi d)) = "
        f"{found.expected:.2g}: the cosine tells how many numbers are trained, and falls as they become more."
    )


def _megabytes(figure: MemoryFigure) -> float | None:
    return None if figure.peak_bytes is None else figure.peak_bytes / _MB


def _cell(value: float | None, in_seconds: bool = False) -> str:
    return "" if value is None else f"{value:.2f}" if in_seconds else f"{value:.1f}"


def _ratio(value: float | None, reference: float | None) -> str:
    return "" if value is None or reference is None else f"{value / reference:.2f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
