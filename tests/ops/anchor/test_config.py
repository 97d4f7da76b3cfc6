"""Settings: ranges, errors that say what to do, JSON that is data."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_memeff.ops.anchor.config import AnchorAttentionConfig

THRESHOLDS = {0: [1.5, math.inf], 7: [0.0, 12.0]}


def test_defaults_are_the_papers() -> None:
    config = AnchorAttentionConfig()
    assert (config.theta, config.block_size, config.step, config.init_blocks) == (12.0, 128, 16, 1)
    assert (config.min_length, config.dense_tail, config.max_keep, config.backend) == (4096, 0, None, None)
    assert config.dense_share(0.7) == 0.7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("theta", math.nan),
        ("theta", -math.inf),
        ("theta", 2e4),
        ("theta", "12"),
        ("theta", None),
        ("theta", True),
        ("block_size", 0),
        ("block_size", 1.0),
        ("block_size", True),
        ("block_size", 2**40),
        ("step", 0),
        ("init_blocks", -1),
        ("dense_tail", -1),
        ("min_length", 0),
        ("max_keep", 0),
        ("dense_above", 1.5),
        ("dense_above", "never"),
        ("dense_above", math.nan),
        ("backend", ""),
        ("backend", "../../x"),
        ("backend", 3),
        ("strict", 1),
        ("thresholds", [1.0]),
        ("thresholds", {"0": [1.0]}),
        ("thresholds", {0: []}),
        ("thresholds", {0: [math.nan]}),
        ("thresholds", {-1: [1.0]}),
    ],
)
def test_values_out_of_range_are_named_with_what_to_do(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"got {name}=.*expected .*Fix:"):
        AnchorAttentionConfig(**{name: value})


def test_auto_needs_a_calibration_and_says_which_call_makes_one() -> None:
    with pytest.raises(ValueError, match=r"calibrate_anchor\(model, input_ids\)"):
        AnchorAttentionConfig(theta="auto")
    with pytest.raises(ValueError, match="only 'auto' reads"):
        AnchorAttentionConfig(thresholds=THRESHOLDS)


def test_thresholds_are_looked_up_by_layer_and_checked_against_the_heads() -> None:
    config = AnchorAttentionConfig(theta="auto", thresholds=THRESHOLDS)
    assert config.head_thresholds(7, 2) == (0.0, 12.0)
    for layer, heads in ((7, 3), (1, 2)):
        with pytest.raises(ValueError, match=f"layer {layer}, expected {heads}.*calibrate_anchor"):
            config.head_thresholds(layer, heads)
    assert AnchorAttentionConfig(theta=3.0).head_thresholds(5, 2) == (3.0, 3.0)


def test_later_changes_of_the_callers_thresholds_have_no_effect() -> None:
    mine = {0: [1.0]}
    config = AnchorAttentionConfig(theta="auto", thresholds=mine)
    mine[0][0] = 99.0
    assert config.head_thresholds(0, 1) == (1.0,)


@pytest.mark.parametrize(
    "config",
    [
        AnchorAttentionConfig(),
        AnchorAttentionConfig(theta=math.inf, dense_above=None, max_keep=7, backend="torch", strict=True),
        AnchorAttentionConfig(theta="auto", thresholds=THRESHOLDS, dense_above=0.5, dense_tail=9),
    ],
    ids=["default", "inf", "calibrated"],
)
def test_json_round_trip(config: AnchorAttentionConfig, tmp_path: Path) -> None:
    config.save(tmp_path / "anchor.json")
    assert AnchorAttentionConfig.load(tmp_path / "anchor.json") == config
    json.loads(config.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = AnchorAttentionConfig(theta=3.0)
    earlier.save(tmp_path / "anchor.json")

    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        AnchorAttentionConfig().save(tmp_path / "anchor.json")
    assert AnchorAttentionConfig.load(tmp_path / "anchor.json") == earlier
    assert [path.name for path in tmp_path.iterdir()] == ["anchor.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '"theta"',
        '{"theta": NaN}',
        '{"theta": "os"}',
        '{"backend": "http://x"}',
        '{"parent_library": "os"}',
        '{"thresholds": {"0": ["inf", "x"]}, "theta": "auto"}',
        '{"thresholds": {"../x": [1.0]}, "theta": "auto"}',
        '{"thresholds": {"0": {"a": 1}}, "theta": "auto"}',
        '{"theta": "' + "x" * 10_000_000 + '"}',
        " " * 2**24 + "{}",
    ],
    ids=lambda text: text[:24],
)
def test_files_from_strangers_are_data(text: str, tmp_path: Path) -> None:
    (tmp_path / "anchor.json").write_text(text)
    before = set(sys.modules)
    with pytest.raises(ValueError) as caught:
        AnchorAttentionConfig.load(tmp_path / "anchor.json")
    assert len(str(caught.value)) < 1000
    assert "anchor.json" in str(caught.value) and "Fix: " in str(caught.value)
    assert set(sys.modules) == before
