"""Publish an adapter with its card on the Hub, with the user's own login."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from hf_memeff.recipes.card import MARKER
from hf_memeff.recipes.card_fields import CardError, check_hub_id
from hf_memeff.recipes.card_files import published_files, read_adapter_config, refuse_unpublishable
from hf_memeff.recipes.card_runs import read_runs
from hf_memeff.tuners.portable import CARD_NAME, OPTIONS_NAME

_NEEDED = (CARD_NAME, CONFIG_NAME, OPTIONS_NAME, SAFETENSORS_WEIGHTS_NAME)
_REFUSALS = (*HfHubHTTPError.__bases__, OSError, ValueError)
"""What an upload fails with: errors of the HTTP library that huggingface_hub is built on (another one in each of its
major versions), of the login, and of the Hub's check of the card's metadata."""


def check_repository(repository: str) -> None:
    """Refuse a repository's id that is none, before anything is rendered or trained.

    Raises:
        CardError: it is a local path or not of the form "owner/name".
    """
    check_hub_id("repository", repository, "a repository of yours on the Hub, as 'owner/name'")


def push(folder: Path, repository: str, *, private: bool = False, api: Any = None) -> str:
    """Upload an adapter's files in one commit; the repository is made if it is not there.

    Goes up: what `published_files` lists, `memeff_config.json` among it. Stays: everything else, so all pickles and
    checkpoints.

    Args:
        folder: an adapter's folder with a card of `write_card`.
        repository: id, as "owner/name".
        private: whether a new repository is visible to its owner alone; an existing one stays as it is.
        api: what to upload with; None is `HfApi()`, with the token of ``hf auth login`` or HF_TOKEN.

    Returns:
        The address of the commit.

    Raises:
        CardError: the id is none, there is no card, a file has a path of this machine, an adapter with approximate
            gradients was not compared with LoRA, or the Hub refused or could not be reached.
    """
    check_repository(repository)
    card = folder / CARD_NAME
    if not card.is_file() or MARKER not in card.read_text(encoding="utf-8"):
        raise CardError(f"Got no card in {folder}, expected one to publish with. Fix: hf-memeff card {folder}.")
    read_adapter_config(folder)
    _refuse_uncompared(folder)
    refuse_unpublishable(folder)
    files = published_files(folder)
    links = [name for name in _NEEDED if (folder / name).is_symlink()]
    if links:
        raise CardError(
            f"Got {links[0]} as a link in {folder}, expected the file itself, since a link may lead anywhere on this "
            "machine. Fix: copy the file into the folder."
        )
    operations = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=str(path)) for path in files]
    api = HfApi() if api is None else api
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message="Adapter with its model card")
    except _REFUSALS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CardError(
            f"Got no upload to {repository!r} ({reason}), expected the Hub to accept it. Fix: log in with "
            "hf auth login, with a token that may write there, and look at the connection (HF_HUB_OFFLINE too)."
        ) from error
    return str(commit.commit_url)


def _refuse_uncompared(folder: Path) -> None:
    """An approximate gradient can learn worse than LoRA's; who loads the adapter has to be able to see whether."""
    runs = read_runs(folder, ())
    compared = runs.lora is not None and set(runs.own.evaluation) & set(runs.lora.evaluation)
    if not runs.own.exact and not compared:
        raise CardError(
            "Got an adapter trained with approximate gradients and no metric of a plain LoRA run beside its own, "
            "expected both on the same data, seed and steps. Fix: hf-memeff finetune with method: lora and a test "
            "split, then hf-memeff card with --reference and that run's folder."
        )
