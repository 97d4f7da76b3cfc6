"""Adapters on the Hub: what is asked for, and what happens when a file is not there. No network is used."""

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from hf_memeff.tuners.portable import OPTIONS_NAME

REPOSITORY = "someone/adapter"


class FakeHub:
    """A repository made of local files, seen through the two functions of huggingface_hub that the package calls."""

    def __init__(self, folder, files):
        self.folder, self.files, self.downloads = folder, files, []

    def hf_hub_download(self, repo_id, filename, *, subfolder=None, revision=None, token=None, cache_dir=None):
        path = f"{subfolder}/{filename}" if subfolder else filename
        self.downloads.append((repo_id, path, revision, token))
        if path not in self.files:
            raise EntryNotFoundError(f"no {path}")
        return str(self.folder / filename)

    def list_repo_files(self, repo_id, *, revision=None, token=None):
        return list(self.files)


@pytest.fixture
def hub(ours, tmp_path, monkeypatch):
    ours(r=3, target_modules=["q_proj"], tiled_loss="always").save_pretrained(tmp_path)

    def serve(*files):
        fake = FakeHub(tmp_path, files)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
        monkeypatch.setattr(
            huggingface_hub.HfApi, "list_repo_files", lambda self, *a, **k: fake.list_repo_files(*a, **k)
        )
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        return fake

    return serve


def test_both_files_are_read(ours, hub):
    fake = hub("adapter_config.json", OPTIONS_NAME, "adapter_model.safetensors")
    config = ours.from_pretrained(REPOSITORY, revision="v1", token="secret", ephemeral_gpu_offload=False)
    assert config.r == 3 and config.tiled_loss == "always"
    assert fake.downloads == [
        (REPOSITORY, "adapter_config.json", "v1", "secret"),
        (REPOSITORY, OPTIONS_NAME, "v1", "secret"),
    ]


def test_a_plain_lora_repository_gives_default_options(ours, hub):
    hub("adapter_config.json", "adapter_model.safetensors")
    assert ours.from_pretrained(REPOSITORY).tiled_loss == "auto"


def test_a_subfolder_is_asked_for(ours, hub):
    fake = hub("b/adapter_config.json", f"b/{OPTIONS_NAME}", "b/adapter_model.safetensors", "adapter_model.bin")
    assert ours.from_pretrained(REPOSITORY, subfolder="b").r == 3
    assert [path for _, path, _, _ in fake.downloads] == ["b/adapter_config.json", f"b/{OPTIONS_NAME}"]


def test_c77_a_pickle_on_the_hub_is_refused(ours, hub):
    hub("adapter_config.json", "adapter_model.bin")
    with pytest.raises(ValueError, match=r"got adapter_model\.bin \(a pickle"):
        ours.from_pretrained(REPOSITORY)


def test_a_repository_without_an_adapter_is_refused(ours, hub):
    hub("README.md")
    with pytest.raises(ValueError, match=r"got no adapter_config\.json in 'someone/adapter'"):
        ours.from_pretrained(REPOSITORY)


def test_offline_without_a_cached_options_file_the_options_are_the_defaults(ours, hub, monkeypatch):
    fake = hub("adapter_config.json")

    def cached_only(repo_id, filename, *, subfolder=None):
        if filename == OPTIONS_NAME:
            raise LocalEntryNotFoundError("not cached")
        return fake.hf_hub_download(repo_id, filename, subfolder=subfolder)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached_only)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert ours.from_pretrained(REPOSITORY).engine_options() == ours.config_class().engine_options()
