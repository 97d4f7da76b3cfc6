"""What a run needs before it begins: model, tokenizer and data, found and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from hf_memeff.recipes.answers import require_answers
from hf_memeff.recipes.card_fields import check_card_fields
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.model_source import ModelSource, find_smollm2, load_config, load_model, load_tokenizer
from hf_memeff.recipes.parsing import RunPlan, adapter_settings
from hf_memeff.recipes.training_data import RunData, in_chat_form, load_data, with_lengths_checked


@dataclass(frozen=True)
class Prepared:
    """What a run needs besides the weights, found and checked.

    Attributes:
        source: where the base model is.
        tokenizer: of the model.
        model_config: of the model.
        data: rows in the form that the trainer takes.
    """

    source: ModelSource
    tokenizer: Any
    model_config: Any
    data: RunData


def prepare(plan: RunPlan, say: Callable[[str], object] = print) -> Prepared:
    """Find model and data, and make every check that needs no weights.

    Args:
        plan: what is to be run.
        say: called with a line before each download.

    Returns:
        What `train` takes.

    Raises:
        RecipeError: see `load_data` and `with_lengths_checked`; or what is to be judged by is missing.
        CardError: the adapter's model card would be rejected.
        ModelUnavailableError: the model is missing.
    """
    run, training = plan.run, plan.training
    source = find_smollm2(run.model_name_or_path, revision=run.model_revision, progress=say)
    _check_card(plan, source)
    data = load_data(run, getattr(training, "dataset_text_field", "text"))
    require_answers(data.test, run.metrics or ())
    if data.test is None and str(training.eval_strategy.value) != "no":
        raise RecipeError(
            f"Got eval_strategy: {training.eval_strategy.value} without a test split, expected one to evaluate on. "
            "Fix: set dataset_test_split or dataset_test_name, or eval_strategy: no."
        )
    tokenizer = load_tokenizer(source)
    if run.chat_format and tokenizer.chat_template is not None:
        test = None if data.test is None else in_chat_form(data.test)
        data = RunData(in_chat_form(data.train), test, data.record)
    model_config = load_config(source)
    context = getattr(model_config, "max_position_embeddings", None)
    data = with_lengths_checked(data, run, tokenizer, training.max_length, context)
    return Prepared(source, tokenizer, model_config, data)


def load_base(plan: RunPlan, source: ModelSource) -> Any:
    """The base model of a run, without adapter; what its files lack is drawn with the run's seed.

    Raises:
        ModelUnavailableError: the files cannot be loaded.
    """
    set_seed(plan.training.seed)
    return load_model(source, getattr(torch, plan.run.dtype), attn_implementation=plan.run.attn_implementation)


def is_exact(plan: RunPlan) -> bool:
    """Whether a run's gradients are LoRA's."""
    return plan.run.method != "sage" or getattr(plan.adapter, "token_budget", None) == 1


def public_settings(plan: RunPlan) -> dict[str, Any]:
    """The adapter's settings without the one that is a path."""
    return {name: value for name, value in adapter_settings(plan.adapter).items() if name != "activation_store_dir"}


def public_model(source: ModelSource) -> str:
    """The base model's Hub id, or the name of a local folder or file without its path."""
    if source.published_name is not None:
        return source.published_name
    path = Path(source.path)
    return (source.gguf_file or path.resolve().name) if path.exists() else source.path


def _check_card(plan: RunPlan, source: ModelSource) -> None:
    """Refuse now what the model card would be rejected for once the adapter is trained."""
    public = public_model(source)
    check_card_fields(
        base_model=public if "/" in public else None,
        method=plan.run.method,
        settings=public_settings(plan),
        exact=is_exact(plan),
        license=plan.run.license,
        language=plan.run.language,
    )
