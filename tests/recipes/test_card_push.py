"""Publishing, recorded by a stand-in for the Hub: which files go up, and what is refused before anything does."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from helpers import forbid_network
from hf_memeff import cli
from hf_memeff.recipes import card_push
from hf_memeff.recipes.card import CardOptions, write_card
from hf_memeff.recipes.card_fields import CardError
from hf_memeff.recipes.card_push import push
from recipes._cards import run_of, save_run


class FakeHub:
    """Records what an `HfApi` would be told."""

    def __init__(self) -> None:
        self.repositories: list[tuple[str, dict[str, Any]]] = []
        self.commits: list[tuple[str, dict[str, bytes]]] = []

    def create_repo(self, repo_id: str, **settings: Any) -> None:
        self.repositories.append((repo_id, settings))

    def create_commit(self, repo_id: str, operations: Any, commit_message: str) -> SimpleNamespace:
        assert commit_message
        uploaded = {entry.path_in_repo: Path(entry.path_or_fileobj).read_bytes() for entry in operations}
        self.commits.append((repo_id, uploaded))
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MeSP adapter with its card."""
    folder = save_run(tmp_path_factory.mktemp("push") / "mesp", run_of("mesp"))
    write_card(CardOptions(folder, repository="me/adapter"))
    return folder


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def test_the_adapter_its_configs_and_its_results_go_up_as_they_are(adapter: Path, hub: FakeHub) -> None:
    with forbid_network():
        address = push(adapter, "me/adapter", private=True, api=hub)
    assert address == "https://huggingface.co/me/adapter/commit/1"
    assert hub.repositories == [("me/adapter", {"private": True, "exist_ok": True})]
    ((repository, uploaded),) = hub.commits
    assert repository == "me/adapter"
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "memeff_config.json", "results.json"]
    assert sorted(uploaded) == names
    assert all(uploaded[name] == (adapter / name).read_bytes() for name in names)


def test_pickles_checkpoints_and_strange_files_stay(adapter: Path, hub: FakeHub, tmp_path: Path) -> None:
    for name in ("training_args.bin", "adapter_model.bin", "optimizer.pt", "rng_state.pth", "scaler.pkl"):
        torch.save({}, adapter / name)
    (adapter / "notes.txt").write_text("my secret", encoding="utf-8")
    (adapter / ".env").write_text("HF_TOKEN=x", encoding="utf-8")
    (adapter / "README.earlier.md").write_text("draft", encoding="utf-8")
    (adapter / "checkpoint-4").mkdir()
    (adapter / "checkpoint-4" / "README.md").write_text("x", encoding="utf-8")
    (tmp_path / "secret").write_text("{}", encoding="utf-8")
    (adapter / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    (adapter / "learning_curve.svg").write_text("<svg></svg>", encoding="utf-8")
    (adapter / "vocab.json").symlink_to(tmp_path / "secret")
    push(adapter, "me/adapter", api=hub)
    assert sorted(hub.commits[0][1]) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "learning_curve.svg",
        "memeff_config.json",
        "results.json",
        "tokenizer_config.json",
    ]


def test_weights_in_a_pickle_are_refused(adapter: Path, hub: FakeHub) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({}, adapter / "adapter_model.bin")
    with pytest.raises(CardError, match=r"adapter_model\.bin \(a pickle"):
        push(adapter, "me/adapter", api=hub)
    torch.save({}, adapter / "adapter_model.safetensors")
    with pytest.raises(CardError, match=r"no readable adapter_model\.safetensors"):
        push(adapter, "me/adapter", api=hub)
    assert not hub.repositories and not hub.commits


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "memeff_config.json"])
def test_a_needed_file_that_is_a_link_is_refused(name: str, adapter: Path, hub: FakeHub, tmp_path: Path) -> None:
    (adapter / name).rename(tmp_path / name)
    (adapter / name).symlink_to(tmp_path / name)
    with pytest.raises(CardError, match=f"Got {name} as a link"):
        push(adapter, "me/adapter", api=hub)
    assert not hub.repositories


@pytest.mark.parametrize("repository", ["/home/alice/adapter", "a/b/c", "me/my adapter", "me/x.git"])
def test_what_is_no_repository_is_refused(repository: str, adapter: Path, hub: FakeHub) -> None:
    with pytest.raises(CardError, match="expected a repository of yours on the Hub"):
        push(adapter, repository, api=hub)
    assert not hub.repositories


def test_a_folder_without_our_card_is_refused(adapter: Path, hub: FakeHub) -> None:
    (adapter / "README.md").write_text("My own words.", encoding="utf-8")
    with pytest.raises(CardError, match=r"Got no card in .*Fix: hf-memeff card"):
        push(adapter, "me/adapter", api=hub)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "learning_curve.svg", "chat_template.jinja", "README.md"])
def test_a_path_of_this_machine_in_any_file_is_refused(name: str, adapter: Path, hub: FakeHub) -> None:
    with (adapter / name).open("a", encoding="utf-8") as file:
        file.write('"/home/alice/models/base"')
    with pytest.raises(CardError, match=f"Got '/home/alice/models/base' in {name}"):
        push(adapter, "me/adapter", api=hub)
    assert not hub.repositories and not hub.commits


def test_a_refusal_of_the_hub_is_one_error_with_the_way_out(adapter: Path) -> None:
    with pytest.raises(CardError, match=r"Got no upload to 'me/adapter'.*hf auth login"):
        push(adapter, "me/adapter")  # the tests run with HF_HUB_OFFLINE=1


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError.__bases__[0]("connection refused"),
        LocalTokenNotFoundError("no token"),
        ValueError("Invalid metadata in README.md.\n- base_model"),
    ],
)
def test_each_way_to_fail_is_told_in_one_line(
    error: Exception, adapter: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(hub, "create_commit", fail)
    with pytest.raises(CardError, match=r"Got no upload to 'me/adapter' \(") as caught:
        push(adapter, "me/adapter", api=hub)
    assert "\n" not in str(caught.value) and str(error).split()[-1] in str(caught.value)


def test_the_command_renders_and_publishes(
    adapter: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card_push, "HfApi", lambda: hub)
    assert cli.main(["card", str(adapter), "--push", "me/new", "--private"]) == 0
    assert "Published: https://huggingface.co/me/new/commit/1" in capsys.readouterr().out
    assert b'adapter = "me/new"' in hub.commits[0][1]["README.md"]
    assert hub.repositories[0][1]["private"] is True


def test_a_wrong_repository_is_refused_before_the_card_is_written(adapter: Path) -> None:
    before = (adapter / "README.md").read_bytes()
    assert cli.main(["card", str(adapter), "--push", "a/b/c"]) == 2
    assert (adapter / "README.md").read_bytes() == before
