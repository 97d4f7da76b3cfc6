"""The gradients' cosine: right against one worked out by hand, better with more tokens, never measured twice."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memeff.benchmarks import sage_cosine as module
from hf_memeff.benchmarks.comparison import fill_adapters
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_cosine import CosinePlan, Cosines, block_gradients, cosine, planned_cosines
from hf_memeff.benchmarks.sage_methods import LORA, SageMethod, make_model
from hf_memeff.benchmarks.sage_results import CosineResult
from hf_memeff.benchmarks.sage_text import Batch, in_order, read_rows
from hf_memeff.benchmarks.sage_training import Training, save_adapter
from hf_memeff.benchmarks.shelf import Shelf

PLAN = CosinePlan(model="tiny", rank=2, batches=3, rows_per_batch=4, b_std=0.1)


@pytest.fixture(scope="module")
def batches(data: Path, tokenizer: Any) -> list[Batch]:
    return in_order(read_rows(data, "gsm8k", "test", tokenizer, 160, 12), 0, 4)


def cosines(folder: Path, base: Any, batches: list[Batch], trained: Path | None = None) -> Cosines:
    shelf = Shelf(CosineResult, folder)
    return Cosines(PLAN, base, batches, trained, shelf, Environment.here(), say=lambda text: None)


def test_the_plan_starts_with_the_default_and_has_every_variant() -> None:
    methods = planned_cosines([0.25, 0.5])
    assert len(methods) == len(set(methods)) == 3 * 4 * 2
    assert methods[:2] == [SageMethod("sage-gradient", 0.25), SageMethod("sage-gradient", 0.5)]
    for name, own, other in (("sage-attention", "kept", "all"), ("sage-gradient", "all", "kept")):
        variants = {(m.dense_layers, m.backward_keys) for m in methods if m.name == name}
        assert variants == {((-1,), own), ((), own), ((-1,), other)}


def test_a_cosine_is_sage_s_gradient_to_lora_s(base: Any, batches: list[Batch], tmp_path: Path) -> None:
    bench, methods = cosines(tmp_path, base, batches), planned_cosines([1.0, 0.25], ["attention", "random"])
    done: list[int] = []
    bench.advance = lambda text, count: done.append(count)
    expected = bench.steps(methods)
    bench.run(methods)
    assert sum(done) == expected == (len(methods) + 1) * 3
    found = {r.key: r for r in bench.shelf.all()}
    assert len(found) == len(methods) == 12
    whole = found["gsm8k-random-attention-1-dense-1-kept"]
    assert whole.cosines == pytest.approx([1.0] * 3, abs=1e-6)
    assert whole.norm_ratios == pytest.approx([1.0] * 3, abs=1e-5)
    method = SageMethod("sage-attention", 0.25, (), "kept")
    models = [make_model(way, base, rank=2, seed=0) for way in (method, LORA)]
    fill_adapters(models, std=PLAN.b_std)
    own, true = (_gradient(model, batches[1]) for model in models)
    by_hand = torch.cosine_similarity(own, true, dim=0).item()
    result = found["gsm8k-random-attention-0.25-densenone-kept"]
    assert result.cosines[1] == pytest.approx(by_hand, abs=1e-5)
    assert by_hand < 0.99
    assert result.norm_ratios[1] == pytest.approx((own.norm() / true.norm()).item(), abs=1e-5)
    assert len(result.layer_cosines) == 2
    dense = found["gsm8k-random-attention-0.25-dense-1-kept"]
    assert dense.layer_cosines[1] == pytest.approx(1.0, abs=1e-5)
    assert result.layer_cosines[1] < 0.99


def _gradient(model: Any, batch: Batch) -> torch.Tensor:
    parameters = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
    gradients = torch.autograd.grad(model(**batch).loss, parameters)
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def test_blocks_are_in_their_order(batches: list[Batch], base: Any) -> None:
    model = make_model(LORA, base, rank=2, seed=0)
    fill_adapters([model])
    gradients = block_gradients(model, batches[0])
    for index, gradient in enumerate(gradients):
        own = [p.grad for n, p in model.named_parameters() if p.requires_grad and f"layers.{index}." in n]
        assert gradient.numel() == sum(g.numel() for g in own)
        assert gradient.norm().item() == pytest.approx(sum(g.norm().item() ** 2 for g in own) ** 0.5, rel=1e-5)


def test_nothing_is_measured_twice_and_an_interruption_keeps_the_rest(
    base: Any, batches: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = planned_cosines([0.5, 0.25], ["random"])[:3]
    own, calls = module.block_gradients, []

    def interrupt(model: Any, batch: Batch) -> list[torch.Tensor]:
        calls.append(batch)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return own(model, batch)

    monkeypatch.setattr(module, "block_gradients", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cosines(tmp_path, base, batches).run(methods)
    assert [path.stem for path in tmp_path.glob("*.json")] == ["gsm8k-random-random-0.5-dense-1-kept"]
    cosines(tmp_path, base, batches).run(methods)
    assert len(calls) == 8 + 3 + 2 * 3
    monkeypatch.setattr(module, "make_model", lambda *args, **kwargs: pytest.fail("measured again"))
    bench = cosines(tmp_path, base, batches)
    assert bench.steps(methods) == 0
    bench.run(methods)


def test_after_training_is_another_point_and_said_if_there_is_none(
    base: Any, batches: list[Batch], tmp_path: Path
) -> None:
    method, lines = SageMethod("sage-random", 0.5), []
    bench = cosines(tmp_path / "a", base, batches)
    bench.say = lines.append
    bench.run([method])
    assert any("gradients after training left out" in line for line in lines)
    model = make_model(LORA, base, rank=2, seed=3)
    training = Training(model, 1e-2, 4)
    for batch in batches:
        training.step(batch)
    save_adapter(model, tmp_path / "lora.safetensors")
    bench = cosines(tmp_path / "a", base, batches, tmp_path / "lora.safetensors")
    bench.run([method])
    results = {result.adapter: result for result in bench.shelf.all()}
    assert (results["random"].b_std, results["trained"].b_std) == (0.1, None)
    assert results["random"].cosines != results["trained"].cosines
    again = cosines(tmp_path / "b", base, batches)
    again.run([method])
    assert again.shelf.all()[0].cosines == results["random"].cosines


def test_more_tokens_point_better(base: Any, batches: list[Batch], tmp_path: Path) -> None:
    bench = cosines(tmp_path, base, batches)
    bench.run([SageMethod("sage-gradient", budget) for budget in (0.75, 0.25)])
    small, large = (statistics.fmean(result.cosines) for result in bench.shelf.all())
    assert small < large < 1


def test_cosine_of_parallel_and_orthogonal_vectors() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])
    assert cosine(a, 2 * a) == pytest.approx(1)
    assert cosine(a, b) == pytest.approx(0)
