"""The memory tables: shape of the figures, skipped arithmetic, undoing, rendering, and the example's small version."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from hf_memeff import memeff_status
from hf_memeff.benchmarks.results import Environment, read_results
from hf_memeff.recipes.config_keys import parse_keys
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.memory_tables import run as run_module
from hf_memeff.recipes.memory_tables.methods import METHODS, SWEPT, blocks_run_as, loss_runs_as, make_step
from hf_memeff.recipes.memory_tables.models import build_base, bytes_of, trained, with_adapter
from hf_memeff.recipes.memory_tables.paper import PAPER
from hf_memeff.recipes.memory_tables.results import CosineFigure, MemoryFigure
from hf_memeff.recipes.memory_tables.run import COSINE_NAME, RESULTS_NAME, TABLES_NAME, MemoryTables
from hf_memeff.recipes.memory_tables.settings import PAPER_MODELS, SHAPES, TableSettings
from hf_memeff.recipes.memory_tables.tables import render
from recipes._examples import EXAMPLES, commands_of, example

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

TINY: dict[str, Any] = {"models": ["tiny"], "lengths": [64, 128], "ranks": [4, 16], "tokens": 64, "rank": 4}
BLOCKS = 2


def adapted(precision: str, rank: int = 4) -> Any:
    return with_adapter(build_base(SHAPES["tiny"], precision, "cpu", BLOCKS, seed=0), precision, rank, seed=0)


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(1024, (1, tokens), generator=torch.Generator().manual_seed(0))


def peaks(folder: Path) -> dict[tuple[str, str, int, int, str], int]:
    figures = read_results(MemoryFigure, folder / RESULTS_NAME)
    return {(f.precision, f.model, f.tokens, f.rank, f.method): f.peak_bytes for f in figures}


def assert_in_shape(found: dict[tuple[str, str, int, int, str], int], models: Sequence[str]) -> None:
    """MeSP below MeBP and that below its stock loss everywhere; everything grows with length and rank."""
    cases = {key[:4] for key in found}
    assert {model for _, model, _, _ in cases} == set(models)
    for case in cases:
        assert found[*case, "mesp"] < found[*case, "mebp"] < found[*case, "mebp-stock-loss"], case
    for small in cases:
        for large in cases:
            longer = small[:2] == large[:2] and small[3] == large[3] and small[2] < large[2]
            wider = small[:3] == large[:3] and small[3] < large[3]
            for method in SWEPT:
                assert not longer or found[*small, method] < found[*large, method], (small, large, method)
                assert not wider or found[*small, method] <= found[*large, method], (small, large, method)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    settings = TableSettings(
        output_dir=str(folder),
        precisions=["fp32"],
        layers=BLOCKS,
        products="skipped",
        draws=3,
        cosine_tokens=16,
        **TINY,
    )
    MemoryTables(settings, say=lambda line: None).run()
    return folder


def test_mesp_is_below_mebp_and_all_grow_with_length_and_rank(run: Path) -> None:
    found = peaks(run)
    assert len(found) == len(METHODS) + 2 * 4
    assert_in_shape(found, ["tiny"])
    case = "fp32", "tiny", 64, 4
    assert found[*case, "mesp-stock-loss"] > found[*case, "mesp"]
    assert found[*case, "lora"] > found[*case, "mebp"]


def test_figures_say_what_they_are_of(run: Path) -> None:
    figures = read_results(MemoryFigure, run / RESULTS_NAME)
    one = next(f for f in figures if (f.method, f.tokens, f.rank) == ("mesp", 64, 4))
    assert (one.layers, one.layers_of_model, one.products, one.meter) == (BLOCKS, 4, "skipped", "cpu profiler")
    # seven adapters per block, 64 tokens, rank 4, four bytes
    assert one.h_bytes == BLOCKS * 7 * 64 * 4 * 4 and one.h_seconds is None and one.step_seconds == ()
    assert one.weight_bytes == 4 * SHAPES["tiny"].parameters - 4 * 2 * _block_parameters() + _small_tensors()
    assert one.environment.versions["torch"]
    cosine = read_results(CosineFigure, run / COSINE_NAME)[0]
    assert cosine.draws == 3 and cosine.parameters == one.gradient_bytes // 4
    assert abs(cosine.mean) < 1 and cosine.standard_error > 0


def _block_parameters() -> int:
    shape = SHAPES["tiny"]
    return (shape.parameters - shape.vocabulary * shape.hidden_size) // shape.layers


def _small_tensors() -> int:
    """Bytes of norms and biases, which `ModelShape.parameters` leaves out."""
    shape = SHAPES["tiny"]
    biases = shape.hidden_size + 2 * shape.hidden_size * shape.key_value_heads // shape.heads
    return 4 * (BLOCKS * (2 * shape.hidden_size + biases) + shape.hidden_size)


def test_the_ablation_of_h_costs_what_h_takes(run: Path) -> None:
    found = peaks(run)
    figures = read_results(MemoryFigure, run / RESULTS_NAME)
    h_bytes = next(f.h_bytes for f in figures if f.method == "mesp-h")
    difference = found["fp32", "tiny", 64, 4, "mesp-h"] - found["fp32", "tiny", 64, 4, "mesp"]
    # all of it where the peak is behind the forward pass of the last block
    assert h_bytes // BLOCKS <= difference <= h_bytes


@pytest.mark.parametrize("precision", ["fp32", "nf4"])
def test_skipped_products_allocate_as_computed_ones(precision: str) -> None:
    if precision == "nf4":
        pytest.importorskip("bitsandbytes")
    model = adapted(precision)
    keys = ["lora-stock-loss", "mebp", "mesp", "mezo"]
    found = {}
    for products in ("computed", "skipped"):
        tables = MemoryTables(TableSettings(products=products, precisions=[precision], **TINY))
        found[products] = {key: peak for key, (peak, _, _) in tables._methods(model, ids(40), keys).items()}
    hidden_bytes = 40 * SHAPES["tiny"].hidden_size * (4 if precision == "fp32" else 2)
    for key in keys[1:]:
        assert found["skipped"][key] == found["computed"][key], (key, found)
    # without arithmetic autograd adds some gradients up in new tensors, since a second reference keeps it from reusing
    assert 0 <= found["skipped"][keys[0]] - found["computed"][keys[0]] < 4 * hidden_bytes, found


def test_nf4_is_four_bits_with_the_adapter_in_bfloat16() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = adapted("nf4")
    linears = [m for m in model.modules() if isinstance(m, LoraLayer)]
    assert len(linears) == 7 * BLOCKS
    assert all(isinstance(m.base_layer, bitsandbytes.nn.Linear4bit) for m in linears)
    assert all(m.base_layer.weight.quant_state.quant_type == "nf4" for m in linears)
    assert {p.dtype for p in trained(model)} == {torch.bfloat16}
    first, second = (block.mlp.up_proj.base_layer.weight for block in model.get_base_model().model.layers)
    assert first.data_ptr() == second.data_ptr()
    with blocks_run_as(model, "mesp"):
        assert {block.path for block in memeff_status(model).blocks} == {"structured"}


def test_a_method_leaves_the_model_as_it_was() -> None:
    model = adapted("fp32")
    kinds = {name: type(module) for name, module in model.named_modules()}
    for method in METHODS.values():
        with blocks_run_as(model, method.blocks), loss_runs_as(model, method.tiled_loss):
            for parameter in trained(model):
                parameter.grad = torch.zeros_like(parameter)
            make_step(model, method, ids(8))()
        assert {name: type(module) for name, module in model.named_modules()} == kinds, method.key
        for name, module in model.named_modules():
            assert "forward" not in module.__dict__, (method.key, name)
            assert not module._forward_pre_hooks and not module._forward_hooks, (method.key, name)
            assert not getattr(module, "gradient_checkpointing", False), (method.key, name)


def test_a_way_with_other_gradients_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run_module.GRADIENT_LIMITS, "fp32", 0.0)
    settings = TableSettings(output_dir=str(tmp_path), precisions=["fp32"], draws=0, **TINY)
    with pytest.raises(RecipeError, match="differ from LoRA's by"):
        MemoryTables(settings, say=lambda line: None).run()
    assert not (tmp_path / RESULTS_NAME).exists()


def figure(method: str, peak: int, **fields: Any) -> MemoryFigure:
    built = MemoryFigure(
        model="Qwen2.5-0.5B",
        precision="nf4",
        layers=24,
        layers_of_model=24,
        tokens=256,
        rank=8,
        method=method,
        device="cpu",
        products="computed",
        seed=0,
        mlp_tile_tokens=0,
        peak_bytes=peak,
        meter="cpu profiler",
        weight_bytes=1,
        gradient_bytes=1,
        h_bytes=688_128,
        h_seconds=None,
        step_seconds=(),
        environment=Environment("cpu", 2, 2, None, "Linux", {}, None, "2026-12-01"),
    )
    return replace(built, **fields)


def test_tables_put_the_paper_s_figures_beside_ours() -> None:
    figures = [figure(key, 1_000_000 * (40 - place)) for place, key in enumerate(METHODS)]
    figures += [figure(key, 90_000_000, tokens=1024) for key in ("mebp-stock-loss", "mebp", "mesp", "mezo")]
    text = render(figures, None)
    rows = [line for line in text.splitlines() if line.startswith("| Qwen2.5-0.5B | 40.0 |")]
    assert rows == [
        "| Qwen2.5-0.5B | 40.0 | 39.0 | 38.0 | 37.0 | 36.0 | 35.0 | 34.0 | 33.0 | 0.92 | 360.8 | 136.2 | 0.38 |"
    ]
    assert "| 1024 | 90.0 | 90.0 | 90.0 | 90.0 | 1.00 | 1050.3 | 513.6 | 0.49 |" in text
    assert "| Qwen2.5-0.5B | 34.0 | 35.0 | 0.69 | not timed | 136.2 |  |" in text
    assert "Where the meters differ" in text and "Fewer blocks" not in text and "allocated, not computed" not in text


def test_tables_say_what_was_left_out_and_timed() -> None:
    figures = [
        figure(key, 10**6, layers=2, products="skipped", step_seconds=(1.0, 3.0, 2.0), h_seconds=0.015)
        for key in METHODS
    ]
    cosine = CosineFigure("tiny", 1, 32, 8, 640_000, 1e-2, 20, 8e-4, 1e-4, 9.97e-4, 0, figures[0].environment)
    text = render(figures, cosine)
    assert "Fewer blocks than the models have (Qwen2.5-0.5B: 2 of 24)" in text
    assert "allocated, not computed" in text
    assert "### Seconds of a step, by model" in text and "| 2.00 | 1.00 | 0.68 | 0.86 | 1.26 |" in text
    assert "0.0008 +- 0.0001" in text and "over 20 directions" in text and "The paper: about 0.001" in text


def test_the_paper_s_figures_are_in_shape() -> None:
    for (method, case), published in PAPER.items():
        if method == "mesp":
            assert published.megabytes < PAPER["mebp", case].megabytes
    assert {case.model for _, case in PAPER} == set(PAPER_MODELS)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"models": ["Qwen2.5-7B"]}, "models: Qwen2.5-7B, expected one of"),
        ({"precisions": ["int8"]}, "precisions: int8"),
        ({"models": []}, "models without an entry"),
        ({"lengths": [1]}, "lengths: 1, expected at least 2"),
        ({"ranks": [0]}, "ranks: 0"),
        ({"draws": 1}, "draws: 1"),
        ({"products": "skipped", "rounds": 2}, "a step without arithmetic has no time"),
        ({"device": "tpu"}, "device: tpu"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        TableSettings(**fields)


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="expected a folder to write to"):
        MemoryTables(TableSettings(output_dir=str(tmp_path / "file"), precisions=["fp32"])).run()


def test_shared_weights_are_counted_once_by_bytes_of() -> None:
    tensor = torch.zeros(10)
    assert bytes_of([tensor, tensor[2:], torch.zeros(3)]) == 52


def test_the_example_and_its_commands_parse() -> None:
    commands = commands_of("mesp_memory_tables")
    assert len(commands) == 3
    small, whole, _ = (parse_keys(EXAMPLES / "mesp_memory_tables.yaml", words, TableSettings)[0] for words in commands)
    assert (small.layers, small.products, small.models) == (2, "skipped", list(PAPER_MODELS))
    assert (whole.layers, whole.lengths, whole.ranks) == (0, [128, 256, 512, 1024], [4, 8, 16, 32])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_s_small_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    runpy.run_path(str(example("mesp_memory_tables")))["main"](["--output_dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert (tmp_path / TABLES_NAME).read_text(encoding="utf-8").strip() in out
    assert "Qwen2.5-3B: 2 of 36" in out and "The paper: about 0.001" in out
    found = peaks(tmp_path)
    assert_in_shape(found, PAPER_MODELS)
    for precision in ("nf4", "fp32"):
        assert found[precision, "Qwen2.5-0.5B", 256, 8, "mesp"] < found[precision, "Qwen2.5-3B", 256, 8, "mesp"]
    cosine = json.loads((tmp_path / COSINE_NAME).read_text(encoding="utf-8"))["results"][0]
    assert cosine["draws"] == 20 and abs(cosine["mean"]) < 0.01
