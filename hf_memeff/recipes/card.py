"""`hf-memeff card`: the model card of a trained adapter, rendered from the results JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from peft.utils import CONFIG_NAME, TaskType

from hf_memeff.compat import PACKAGE_VERSION
from hf_memeff.recipes import card_text
from hf_memeff.recipes.card_check import check_card, require_finite
from hf_memeff.recipes.card_fields import CardError, CardFields, check_card_fields, wrong
from hf_memeff.recipes.card_files import (
    check_agreement,
    read_adapter_config,
    refuse_local_paths,
    refuse_unpublishable,
    without_local_base,
)
from hf_memeff.recipes.card_runs import CardRuns, label, read_runs
from hf_memeff.recipes.results import RunResult, write_result
from hf_memeff.tuners.portable import CARD_NAME, write_json, write_text

_PLACEHOLDER = "folder or Hub id of this adapter"
MARKER = "<!-- Rendered by `hf-memeff card`: edits below are lost when it runs again. -->"
EARLIER_CARD_NAME = "README.earlier.md"
_TEMPLATE = Path(__file__).parent / "card_template.md"
_LIBRARY_TEMPLATE = "[More Information Needed]"


@dataclass(frozen=True)
class CardOptions:
    """What `hf-memeff card` can be told.

    Attributes:
        folder: the adapter's folder, with its `results.json`.
        base_model: Hub id of the base model, for a run that had it in a local folder.
        license: identifier of the adapter's licence.
        language: code of the data's language.
        references: folders, or results files, of runs to compare with.
        repository: Hub id that the adapter has or will have, for the loading code.
    """

    folder: Path
    base_model: str | None = None
    license: str | None = None
    language: str | None = None
    references: Sequence[Path] = ()
    repository: str | None = None


def write_card(options: CardOptions) -> list[str]:
    """Render README.md into an adapter's folder, and take paths of this machine out of its files.

    Everything is checked before anything is written. Licence and language of an earlier card stay unless others are
    given; the first card takes the run's. A README.md that somebody wrote is kept as `EARLIER_CARD_NAME`.

    Args:
        options: see `CardOptions`.

    Returns:
        A line for the user on each file that was written.

    Raises:
        CardError: a field is wrong, files contradict each other, a reference is not comparable, or a path of this
            machine is left in a file.
        ResultsError: a results file is missing or of another form.
    """
    folder = options.folder
    adapter = read_adapter_config(folder)
    runs = read_runs(folder, options.references)
    check_agreement(folder, adapter, runs.own)
    earlier = _EarlierCard.read(folder / CARD_NAME)
    fields = card_fields(runs.own, adapter, options, earlier)
    published_adapter = without_local_base(adapter, fields)
    refuse_unpublishable(folder, besides=(CARD_NAME, CONFIG_NAME))
    refuse_local_paths(CONFIG_NAME, json.dumps(published_adapter))
    for name, run in runs.references.items():
        refuse_local_paths(name, json.dumps(asdict(run)))
    card = str(render_card(runs, fields, adapter, options.repository))
    check_card(card, fields)
    said = []
    if published_adapter != adapter:
        write_json(str(folder / CONFIG_NAME), published_adapter)
        said.append(f"{CONFIG_NAME} now names {fields.base_model} as the base model.")
    for name, run in runs.references.items():
        if not (folder / name).exists():
            write_result(run, folder / name)
            said.append(f"Copied the results of {label(run)} to {name}.")
    if earlier.is_somebodys:
        (folder / CARD_NAME).replace(folder / EARLIER_CARD_NAME)
        said.append(f"Kept the earlier {CARD_NAME} as {EARLIER_CARD_NAME}.")
    write_text(str(folder / CARD_NAME), card)
    return [*said, f"Wrote {folder / CARD_NAME}."]


def card_fields(run: RunResult, adapter: dict[str, Any], options: CardOptions, earlier: _EarlierCard) -> CardFields:
    """The checked fields of a run's card; its base model is a Hub id.

    Raises:
        CardError: a field is wrong, or the base model's Hub id is not known.
    """
    trained_on = run.base_model if "/" in run.base_model or run.base_revision is not None else None
    named = adapter.get("base_model_name_or_path")
    base_model = options.base_model or trained_on or (named if earlier.is_ours else None)
    if base_model is None:
        raise CardError(
            f"The card got base_model={run.base_model!r}, a local model, expected its id on the Hub. Fix: pass "
            "--base-model with the id of the model that it is an unchanged copy of, or publish it first."
        )
    if trained_on is not None and base_model != trained_on:
        raise wrong("base_model", base_model, f"{trained_on!r}, which the run used", "leave --base-model out")
    return check_card_fields(
        base_model=base_model,
        method=run.method,
        settings=run.settings,
        exact=run.exact,
        base_revision=run.base_revision,
        dataset=run.dataset.name,
        license=options.license or earlier.license or run.license,
        language=options.language or earlier.language or run.language,
    )


def render_card(
    runs: CardRuns, fields: CardFields, adapter: dict[str, Any], repository: str | None = None
) -> ModelCard:
    """The card as an object; writes nothing.

    Args:
        runs: the adapter's run and its references.
        fields: checked fields.
        adapter: content of `adapter_config.json`.
        repository: the adapter's Hub id; without it, the loading code has a placeholder.

    Returns:
        The card, metadata and text.

    Raises:
        CardError: a metric is not a finite number, which the Hub refuses.
    """
    title = f"{str(fields.base_model).rsplit('/', 1)[-1]}-{fields.method}"
    data = ModelCardData(
        base_model=fields.base_model,
        library_name="peft",
        license=fields.license,
        language=fields.language,
        datasets=[fields.dataset] if fields.dataset else None,
        pipeline_tag="text-generation" if adapter.get("task_type") == TaskType.CAUSAL_LM else None,
        tags=fields.tags,
        model_name=title,
        eval_results=_eval_results(runs.own, fields) or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        marker=MARKER,
        title=title,
        method=label(runs.own),
        fields=fields,
        adapter=repository or _PLACEHOLDER,
        training=card_text.training_table(runs.own, fields),
        settings=card_text.settings_table(runs.own),
        measures=card_text.measures_table(runs),
        elsewhere=card_text.measured_elsewhere(runs),
        measured_on=card_text.measured_on(runs.own),
        evaluation=card_text.evaluation_table(runs),
        comparison=card_text.comparison_sentence(runs),
        limits=card_text.limits_list(runs, fields),
        sources=card_text.sources(runs),
        version=PACKAGE_VERSION,
    )


def _eval_results(run: RunResult, fields: CardFields) -> list[EvalResult]:
    """The adapter's metrics for the card's metadata, in full precision."""
    results = []
    for name, values in run.evaluation.items():
        require_finite(name, values.adapter)
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=fields.dataset or "local",
                dataset_name=run.dataset.name,
                dataset_config=run.dataset.config,
                dataset_split=run.dataset.test_split,
                metric_type=name.removeprefix("eval_"),
                metric_name=name,
                metric_value=values.adapter,
            )
        )
    return results


@dataclass(frozen=True)
class _EarlierCard:
    """What the README.md in the folder is.

    Attributes:
        is_ours: `hf-memeff card` has rendered it.
        is_somebodys: it has text that no library has put there.
        license: of an earlier card of ours.
        language: likewise.
    """

    is_ours: bool = False
    is_somebodys: bool = False
    license: str | None = None
    language: str | None = None

    @classmethod
    def read(cls, path: Path) -> _EarlierCard:
        if not path.is_file():
            return cls()
        content = path.read_text(encoding="utf-8")
        if MARKER not in content:
            return cls(is_somebodys=_LIBRARY_TEMPLATE not in content)
        data = ModelCard(content).data
        return cls(is_ours=True, license=data.license, language=data.language)
