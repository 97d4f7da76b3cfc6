"""MemeffLinear: LoRA's numbers, and only the input saved (cases C03, C08, C15, C16, C33)."""

import contextlib
import itertools

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from torch import nn

from hf_memeff import saved_tensor_bytes
from hf_memeff.tuners.layer import MemeffLinear, use_memeff_linears, use_stock_linears


class Projections(nn.Module):
    """Three projections that read one input, as q, k and v do."""

    def __init__(self, dtype=torch.float32, width=24):
        super().__init__()
        self.projections = nn.ModuleDict({name: nn.Linear(width, 40, dtype=dtype) for name in ("q", "k", "v")})

    def forward(self, x):
        return torch.cat([projection(x) for projection in self.projections.values()], -1)


def pair(dtype=torch.float32, adapter_dtype=torch.float32, **settings):
    """The same adapted projections as stock LoRA and as MemeffLinear."""
    models = []
    for ours in (False, True):
        torch.manual_seed(0)
        settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q", "k", "v"], **settings}
        model = inject_adapter_in_model(LoraConfig(**settings), Projections(dtype))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape).mul_(0.3).to(adapter_dtype)
        if ours:
            use_memeff_linears(model)
            assert {type(m) for m in model.projections.values()} == {MemeffLinear}
        models.append(model.train())
    return models


def run(model, x, seed=1):
    """Output and all gradients as float64."""
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad] + [p.grad for p in model.parameters() if p.requires_grad]


def assert_close(got, expected, tolerance=1e-5):
    """Same shape and dtype, and |got - expected| <= tolerance |expected| (2-norms of whole tensors)."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(2, 5, 24), (7, 24), (24,), (0, 24)])
def test_c08_output_and_gradients_are_lora_s(dropout, shape):
    stock, ours = pair(lora_dropout=dropout)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for got, expected in zip(run(ours, x), run(stock, x), strict=True):
        assert_close(got, expected)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "adapter", "autocast"),
    list(itertools.product(DTYPES, ("float32", "base"), (None, torch.bfloat16, torch.float16))),
)
def test_c16_mixed_dtypes_give_lora_s_result(dtype, adapter, autocast):
    adapter_dtype = torch.float32 if adapter == "float32" else dtype
    stock, ours = pair(dtype, adapter_dtype)
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with context:
        results = [run(model, x) for model in (stock, ours)]
    coarse = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    tolerance = max(coarse[d] for d in (dtype, adapter_dtype, autocast or torch.float32))
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected, tolerance)


def test_c15_saved_bytes_hold_one_input_in_its_own_dtype():
    """bfloat16 base, float32 adapters, three projections of one input: stock LoRA keeps a float32 copy for each."""
    stock, ours = pair(torch.bfloat16)
    x = torch.randn(64, 24, dtype=torch.bfloat16, requires_grad=True)
    bytes_stock, bytes_ours = (saved_tensor_bytes(lambda m=model: m(x)) for model in (stock, ours))
    assert bytes_ours <= x.nbytes + 1024
    assert bytes_stock >= 3 * 64 * 24 * 4


def test_c15_dropout_masks_are_not_saved():
    stock, ours = pair(lora_dropout=0.1)
    x = torch.randn(4096, 24, requires_grad=True)
    generator_states = 3 * 5056
    assert saved_tensor_bytes(lambda: ours(x)) <= x.nbytes + generator_states + 1024
    assert saved_tensor_bytes(lambda: stock(x)) > 3 * x.nbytes


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_c03_gradients_follow_requires_grad(wanted):
    stock, ours = pair()
    x = torch.randn(5, 24)
    results = []
    for model in (stock, ours):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(wanted[1] if "lora_A" in name else wanted[2])
        leaf = x.clone().requires_grad_(wanted[0])
        y = model(leaf)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.square().sum().backward()
        results.append([leaf.grad] + [p.grad for n, p in model.named_parameters() if "lora_" in n])
    for expected, got in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_close(got, expected)


def test_several_active_adapters_add_up_as_in_lora():
    models = pair()
    results = []
    for model in models:
        torch.manual_seed(4)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q"], init_lora_weights=False), model, adapter_name="b")
        for module in model.projections.values():
            module.set_adapter(["default", "b"])
        results.append(run(model, torch.ones(3, 24)))
    assert type(models[1].projections["q"]) is MemeffLinear
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected)


def test_disabled_and_merged_layers_are_peft_s_own():
    stock, ours = pair()
    x = torch.randn(3, 24)
    for change in (lambda m: m.merge(), lambda m: m.enable_adapters(False)):
        for model in (stock, ours):
            for module in model.projections.values():
                change(module)
        assert torch.equal(ours(x), stock(x))
    assert not any(module.merged for module in ours.projections.values())  # disabling unmerged them


def test_changing_the_class_back_leaves_stock_layers():
    _, ours = pair()
    use_stock_linears(ours)
    assert {type(m) for m in ours.projections.values()} == {lora.Linear}


def test_a_whole_graph_compiles():
    stock, ours = pair()
    x = torch.randn(3, 24)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for expected, got in zip(run(stock, x), run(compiled, x), strict=True):
        assert_close(got, expected)
