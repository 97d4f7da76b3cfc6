"""Needles by length and depth, and questions about long documents, densely and with AnchorAttention."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_needle import METHODS, Needle, NeedlePlan, Needles
from hf_memeff.benchmarks.anchor_results import NeedleResult
from hf_memeff.benchmarks.anchor_tables import METHOD_TITLES
from hf_memeff.benchmarks.anchor_text import LongText, read_long_text
from hf_memeff.benchmarks.progress import progress
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf, joined
from hf_memeff.benchmarks.tables import table
from hf_memeff.integrations.attention import register_anchor, set_anchor_config
from hf_memeff.recipes.errors import RecipeError, make_output
from hf_memeff.recipes.long_questions import document, read_passages, shipped_passages
from hf_memeff.recipes.model_source import ModelSource, find_smollm2, load_model, load_tokenizer
from hf_memeff.recipes.needle_arguments import NeedleArguments, parse_needles
from hf_memeff.recipes.needle_facts import grid_needles
from hf_memeff.recipes.preparing import public_model


@dataclass(frozen=True)
class _Task:
    """Prompts of one kind: what is hidden in which text, in how many tokens."""

    name: str
    needles: tuple[Needle, ...]
    text: LongText
    lengths: list[int]


@dataclass(frozen=True)
class GridResults:
    """What a model answered.

    Attributes:
        needles: by length and way of attending, a cell per depth.
        questions: the same about documents, a cell per question.
        paths: the files that they are in.
    """

    needles: list[NeedleResult]
    questions: list[NeedleResult]
    paths: tuple[Path, ...]


def run_needles(config: Path, words: Sequence[str] = (), say: Callable[[str], object] = tqdm.write) -> GridResults:
    """Ask a model for needles and about documents, each densely, with AnchorAttention, and with first keys and window
    alone; what is in the output folder already is not asked again.

    Args:
        config: YAML file, see `parse_needles`.
        words: command-line words that replace fields of it.
        say: called with each line for the user.

    Raises:
        RecipeError: see `parse_needles`, `read_passages` and `document`; or a text is too short for its lengths.
        DataError: the folder with the text has none.
        ModelUnavailableError: the model is missing or cannot be loaded.
        ResultsError: a file of the output folder holds something else.
    """
    arguments, anchor = parse_needles(config, words)
    source = find_smollm2(arguments.model_name_or_path, revision=arguments.model_revision, progress=say)
    tokenizer = load_tokenizer(source)
    folder = None if arguments.text is None else Path(arguments.text)
    text = read_long_text(folder, tokenizer, arguments.calibration_tokens)
    tasks = [
        _Task("needles", grid_needles(arguments.depths), text, arguments.lengths),
        _questions(arguments, tokenizer),
    ]
    for task in tasks:
        _check_text(task)
    output = make_output(arguments.output_dir)
    model = _load(arguments, source, say)
    set_anchor_config(model, anchor)  # which calibration and all that follows take over
    name = public_model(source)
    common = (name, arguments.dtype, anchor.to_json(), _digest(text.calibration()))
    calibrations = Calibrations(output / "calibration" / _digest(*common), model, text.calibration())
    environment = Environment.here(str(model.device))
    results: list[list[NeedleResult]] = []
    for task in tasks:
        plan = NeedlePlan(name, task.needles, arguments.answer_tokens)
        shelf = Shelf(NeedleResult, output / task.name / _digest(*common, plan, task.text.ids))
        bench = Needles(plan, model, tokenizer, task.text, calibrations, shelf, environment)
        with progress(bench.steps(task.lengths)) as bench.advance:
            bench.run(task.lengths)
        found = [shelf.find(f"{tokens}-{method}") for tokens in task.lengths for method in METHODS]
        results.append([result for result in found if result is not None])
        joined(results[-1], output / f"{task.name}.json")
    needles, questions = results
    return GridResults(needles, questions, tuple(output / f"{task.name}.json" for task in tasks))


def grid_table(results: Sequence[NeedleResult], columns: Sequence[str]) -> str:
    """A cell for each needle or question: whether it was found, and the loss of the right answer.

    Args:
        results: of one task.
        columns: header of each cell.
    """
    rows = []
    for result in results:
        pairs = zip(result.hits, result.answer_losses, strict=True)
        cells = [f"{'yes' if hit else 'no'} ({loss:.2f})" for hit, loss in pairs]
        density = f"{max(result.densities):.3f}" if min(result.sparse_calls) else "-"
        rows.append([str(result.tokens), METHOD_TITLES[result.method], *cells, density])
    return table(["tokens", "attention", *columns, "density"], rows)


def _questions(arguments: NeedleArguments, tokenizer: Any) -> _Task:
    passages = (
        shipped_passages()
        if arguments.dataset_name is None
        else read_passages(arguments.dataset_name, arguments.dataset_config, arguments.dataset_test_split)
    )
    needles, text = document(passages, arguments.questions, tokenizer)
    return _Task("questions", needles, text, arguments.question_lengths)


def _check_text(task: _Task) -> None:
    available = len(task.text.ids) - task.text.calibration_tokens
    if max(task.lengths) > available:
        names = ("question_lengths", "dataset_name") if task.name == "questions" else ("lengths", "text")
        raise RecipeError(
            f"Got {names[0]}: {max(task.lengths)}, expected at most {available}, the tokens that there are beside "
            f"those for calibration. Fix: shorter ones, or {names[1]} with more text."
        )


def _load(arguments: NeedleArguments, source: ModelSource, say: Callable[[str], object]) -> Any:
    register_anchor()
    say(f"Loading {public_model(source)} ({source.origin}) ...")
    accelerator = None if arguments.use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return load_model(source, getattr(torch, arguments.dtype), accelerator or "cpu")


def _digest(*facts: Any) -> str:
    """A folder's name that differs where anything differs that results depend on."""
    plain = [fact.tolist() if isinstance(fact, torch.Tensor) else fact for fact in facts]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:12]
