"""One layer's attention and a model's prefill on the sparse path: recall, error, loss, and what is measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_op import TARGETS, OpPlan, Ops
from hf_memeff.benchmarks.anchor_prefill import PrefillPlan, Prefills, next_token_loss
from hf_memeff.benchmarks.anchor_results import OpResult, PrefillResult
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.integrations.attention import AnchorAttentionConfig, calibrate_anchor, register_anchor

register_anchor()
TOKENS = 4352  # more than the default min_length


@pytest.fixture(scope="module")
def text() -> LongText:
    """Random bytes."""
    return LongText(torch.randint(1, 257, (7000,), generator=torch.Generator().manual_seed(0)), 2500)


def without_candidates(base: Any, text: LongText, folder: Path) -> Calibrations:
    """A calibration that keeps no candidate: random weights, which are all alike, would need every one."""
    calibrations = Calibrations(folder, base, text.calibration())
    folder.mkdir()
    config = AnchorAttentionConfig(theta="auto", thresholds={layer: [-10.0] * 4 for layer in (0, 1)})
    for target in TARGETS.values():
        config.save(folder / f"positions{TOKENS}-text2500-recall{target:g}.json")
    return calibrations


def test_layers_are_measured_on_the_sparse_path(base: Any, text: LongText, tmp_path: Path) -> None:
    shelf = Shelf(OpResult, tmp_path / "op")
    calibrations = without_candidates(base, text, tmp_path / "calibration")
    bench = Ops(
        OpPlan(model="tiny", layers=(1,), rounds=1),
        base,
        text,
        calibrations,
        tmp_path / "qkv",
        shelf,
        Environment.here(),
    )
    done: list[int] = []
    bench.advance = lambda text, steps: done.append(steps)
    expected = bench.steps([TOKENS])
    bench.run([TOKENS])
    assert sum(done) == expected == 1 + 3 + 1
    results = {result.setting: result for result in shelf.all()}
    calibrated = results["calibrated"]
    assert results["calibrated-0.9"].calibration_tokens == 2500 and len(results["calibrated-0.9"].seconds) == 1
    assert calibrated.path == "sparse" and calibrated.calibration_tokens == 2500
    pairs = TOKENS * (TOKENS + 1) / 2
    left_out = 2048 * (2048 - 256) + 256 * (4096 - 256)  # of the second superblock and of what is behind it
    assert calibrated.density == 0 and calibrated.attended_share == pytest.approx(1 - left_out / pairs)
    assert 0.05 < calibrated.recall_5th < calibrated.recall < 0.9
    assert 0.01 < calibrated.output_error < 1
    default = results["theta-12"]  # keeps every key, so that it is dense
    assert (default.path, default.recall, default.density) == ("kept share", pytest.approx(1, abs=1e-5), 1)
    assert default.output_error < 1e-5
    assert results["theta-12"].calibration_tokens is None and results["theta-12"].step == 16
    assert calibrated.q_bytes == 4 * TOKENS * 16 * 4 and calibrated.temporary_bytes > 0
    assert bench.steps([TOKENS]) == 0
    shelf.add(replace(calibrated, environment=replace(calibrated.environment, cpu="another")))
    assert bench.steps([TOKENS]) == 4  # measured again on this machine, with the tensors that are there


def test_prefill_has_the_models_own_loss(base: Any, text: LongText, tmp_path: Path) -> None:
    ids = text.measured(700)
    with torch.no_grad():
        states = base.base_model(ids).last_hidden_state
        expected = base(ids, labels=ids).loss.item()
    assert next_token_loss(base, states, ids) == pytest.approx(expected, rel=1e-5)
    calibrations = without_candidates(base, text, tmp_path / "calibration")
    bench = Prefills(
        PrefillPlan(model="tiny", tokens=TOKENS, texts=1),
        base,
        text,
        calibrations,
        Shelf(PrefillResult, tmp_path / "prefill"),
        Environment.here(),
    )
    bench.run()
    (result,) = bench.shelf.all()
    assert (result.sparse_calls, result.density, result.step) == (2, 0, 16)
    assert 0 < abs(result.loss_change) < 0.05
    assert bench.steps() == 0
    bench.shelf.add(replace(result, losses=(1.0, 1.0), sparse_calls=9))  # a text more than is asked for is no harm
    assert bench.steps() == 0


def test_a_text_is_added_to_those_that_are_there(base: Any, tmp_path: Path) -> None:
    text = LongText(torch.randint(1, 257, (3700,), generator=torch.Generator().manual_seed(0)), 2500)
    shelf = Shelf(PrefillResult, tmp_path / "prefill")
    found = []
    for texts in (1, 2):
        bench = Prefills(
            PrefillPlan(model="tiny", tokens=600, texts=texts),
            base,
            text,
            Calibrations(tmp_path / "calibration", base, text.calibration()),
            shelf,
            Environment.here(),
        )
        assert bench.steps() == 2
        bench.run()
        found += shelf.all()
    assert len(found[0].losses) == 1 and len(found[1].losses) == 2
    assert found[1].losses[0] == found[0].losses[0] != found[1].losses[1]
    assert found[1].seconds[0] == found[0].seconds[0] and found[1].density == 1


def test_calibrations_are_kept_by_length_and_target(base: Any, text: LongText, tmp_path: Path) -> None:
    calibrations = Calibrations(tmp_path, base, text.calibration())
    assert calibrations.missing(512) and calibrations.tokens == 2500
    config = calibrations.get(512)
    assert config == calibrate_anchor(base, text.calibration())
    assert not calibrations.missing(100) and calibrations.missing(1024) and calibrations.missing(512, 0.9)
    (path,) = tmp_path.iterdir()
    assert AnchorAttentionConfig.load(path) == calibrations.get(300) == config


def test_layers_by_length() -> None:
    assert OpPlan().layers_at(8192, 30) == list(range(30))
    assert OpPlan().layers_at(16384, 30) == [0, 6, 12, 17, 23, 29]
    assert OpPlan().layers_at(16384, 2) == [0, 1]
    assert OpPlan(layers=(1, 40)).layers_at(16384, 30) == [1]
