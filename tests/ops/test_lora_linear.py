"""The LoRA linear op: PEFT's numbers for every pattern of gradients, dtype and dropout (C03, C08, C15, C16, C33)."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from blocks._tolerances import ORDER_OF_SUMS, coarsest, relative_error
from hf_memeff.memory import saved_tensor_bytes
from hf_memeff.ops.dropout import DropMask, draw_mask
from hf_memeff.ops.lora_linear import LinearOp, LoraTerm, lora_linear_apply

N, DIN, DOUT, R = 5, 7, 3, 2
PATTERNS = list(itertools.product([False, True], repeat=4))


def tensors(dtype=torch.float64, rows=(N,), seed=0):
    """x, base output, A, Bm."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*rows, DIN), (*rows, DOUT), (R, DIN), (DOUT, R))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def peft_branch(x, base_out, a, b, scaling, dropout=None):
    """What PEFT's ``lora.Linear`` adds, written out."""
    dropped = x.to(a.dtype) if dropout is None else dropout(x.to(a.dtype))
    return (base_out + F.linear(F.linear(dropped, a), b) * scaling).to(base_out.dtype)


def results(function, given, wanted, *args, seed=3):
    """Output and gradients of the four tensors for a fixed incoming gradient, ``None`` where none is wanted."""
    leaves = [t.clone().requires_grad_(want) for t, want in zip(given, wanted, strict=True)]
    torch.manual_seed(seed)
    y = function(*leaves, *args)
    g = torch.linspace(-1.0, 2.0, y.numel()).view(y.shape).to(y.dtype)
    if y.requires_grad:
        y.backward(g)
    return [y.detach(), *[leaf.grad for leaf in leaves]]


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("wanted", [p for p in PATTERNS if any(p)])
def test_c03_gradcheck_of_every_requires_grad_pattern(wanted, probability):
    leaves = [t.requires_grad_(want) for t, want in zip(tensors(), wanted, strict=True)]
    dropout = nn.Dropout(probability)

    def function(*given):
        torch.manual_seed(3)  # gradcheck calls it many times: one mask for all
        return lora_linear_apply(*given, 0.37, dropout)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("wanted", PATTERNS)
def test_c03_gradients_exist_only_where_they_are_wanted(wanted):
    got = results(lora_linear_apply, tensors(rows=(3, N)), wanted, 0.37)
    expected = results(peft_branch, tensors(rows=(3, N)), wanted, 0.37)
    assert [t is None for t in got[1:]] == [not want for want in wanted]
    for ours, theirs in zip(got, expected, strict=True):
        assert relative_error(ours, theirs) <= ORDER_OF_SUMS[torch.float64]


HALVES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("x_dtype", "base_dtype"), list(itertools.product(HALVES, HALVES)))
@pytest.mark.parametrize("adapter", ["float32", "base"])
def test_c16_every_mix_of_dtypes_gives_lora_s_result(x_dtype, base_dtype, adapter, autocast):
    adapter_dtype = torch.float32 if adapter == "float32" else base_dtype
    x, base_out, a, b = tensors()
    given = [x.to(x_dtype), base_out.to(base_dtype), a.to(adapter_dtype), b.to(adapter_dtype)]
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        got = results(lora_linear_apply, given, (True,) * 4, 0.37)
        expected = results(peft_branch, given, (True,) * 4, 0.37)
    tolerance = coarsest(x_dtype, base_dtype, adapter_dtype, autocast)
    for ours, theirs, source in zip(got, expected, (base_out.to(base_dtype), *given), strict=True):
        assert ours.dtype == theirs.dtype == source.dtype
        assert relative_error(ours, theirs) <= tolerance


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_c08_dropout_is_stock_peft_s_with_the_same_seed(probability, training):
    config = LoraConfig(r=R, lora_alpha=3, lora_dropout=probability, target_modules=["0"], init_lora_weights=False)
    layer = inject_adapter_in_model(config, nn.Sequential(nn.Linear(DIN, DOUT)).double())[0].double().train(training)
    a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    x = torch.randn(4, N, DIN, dtype=torch.float64)

    def stock(x, base_out, a, b):
        return torch.func.functional_call(layer, {"lora_A.default.weight": a, "lora_B.default.weight": b}, (x,))

    def ours(x, base_out, a, b):
        return lora_linear_apply(x, layer.base_layer(x), a, b, layer.scaling["default"], layer.lora_dropout["default"])

    given = (x, torch.zeros(0), a, b)
    got, expected = (results(f, given, (True, False, True, True), seed=21) for f in (ours, stock))
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) <= ORDER_OF_SUMS[torch.float64]
    if probability == 1.0 and training:
        assert not got[3].any() and not got[4].any()
        g = torch.linspace(-1.0, 2.0, got[0].numel()).view(got[0].shape).double()
        assert relative_error(got[1], g @ layer.base_layer.weight) <= ORDER_OF_SUMS[torch.float64]
    else:
        assert got[3].any() and got[4].any()


def test_c08_random_state_after_the_op_is_stock_s_and_backward_leaves_it():
    dropout = nn.Dropout(0.4)
    states = []
    for function in (lora_linear_apply, peft_branch):
        leaves = [t.requires_grad_() for t in tensors()]
        torch.manual_seed(9)
        y = function(*leaves, 0.37, dropout)
        forward = torch.get_rng_state()
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), forward)
        states.append(forward)
    assert torch.equal(*states)


@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_c33_no_rows_give_zero_gradients_and_not_none(rows, probability):
    given = tensors(rows=rows)
    y, *gradients = results(lora_linear_apply, given, (True,) * 4, 0.37, nn.Dropout(probability))
    assert y.shape == (*rows, DOUT)
    for gradient, source in zip(gradients, given, strict=True):
        assert gradient.shape == source.shape and not gradient.any()


def saved(function):
    """Every tensor that autograd packs."""
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        function()
    return packed


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_c15_it_saves_the_input_as_it_came_and_no_float32_copy(probability):
    x = torch.randn(300, DIN, dtype=torch.bfloat16, requires_grad=True)
    a, b = nn.Parameter(torch.randn(R, DIN)), nn.Parameter(torch.randn(DOUT, R))
    base_out = torch.randn(300, DOUT, dtype=torch.bfloat16)
    dropout = nn.Dropout(probability)

    def lean():
        lora_linear_apply(x, base_out, a, b, 0.37, dropout)

    states = 5056 if probability else 0
    assert saved_tensor_bytes(lean) == x.nbytes + states
    assert saved_tensor_bytes(lambda: peft_branch(x, base_out, a, b, 0.37, dropout)) >= 2 * x.nbytes
    packed = saved(lean)
    assert any(t.data_ptr() == x.data_ptr() for t in packed)
    assert not any(t.dtype == torch.float32 and t.shape[0] == len(x) for t in packed)


def test_c15_readers_of_one_input_share_it():
    x = torch.randn(300, DIN, requires_grad=True)
    factors = [nn.Parameter(torch.randn(shape)) for shape in ((R, DIN), (DOUT, R)) * 3]

    def three():
        for a, b in zip(factors[::2], factors[1::2], strict=True):
            lora_linear_apply(x, torch.zeros(300, DOUT), a, b, 0.37)

    assert saved_tensor_bytes(three) == x.nbytes


def test_double_backward_raises_and_says_so():
    leaves = [t.requires_grad_() for t in tensors()]
    (dx,) = torch.autograd.grad(lora_linear_apply(*leaves, 0.37).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_width_that_does_not_fit_is_an_error():
    x, base_out, a, b = tensors()
    with pytest.raises(RuntimeError, match="shape"):
        lora_linear_apply(x, base_out, a[:, :-1], b, 1.0)


def test_it_changes_none_of_its_arguments():
    given = tensors()
    copies = [t.clone() for t in given]
    results(lora_linear_apply, given, (True,) * 4, 0.37)
    lora_linear_apply(*given, 0.37)
    assert all(torch.equal(t, c) for t, c in zip(given, copies, strict=True))


def op_parts(dtype=torch.float64, adapters=2, probability=0.3):
    """A weight, a bias and adapters with masks over N rows."""
    generator = torch.Generator().manual_seed(8)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    masks = [draw_mask(nn.Dropout(probability), N, DIN, dtype, torch.device("cpu")) for _ in range(adapters)]
    parts = [(random(R, DIN), random(DOUT, R), 0.5 + k, mask) for k, mask in enumerate(masks)]
    return random(DOUT, DIN), random(DOUT), parts


def make_op(weight, bias, parts, call=None):
    terms = [LoraTerm(a, b, s, mask, torch.zeros_like(a), torch.zeros_like(b)) for a, b, s, mask in parts]
    return LinearOp(None if call else weight, None if call else bias, call, terms)


def autograd_result(weight, bias, parts, x, g):
    """Output, dx and (dA, dBm) of each adapter by autograd on the formula."""
    x = x.clone().requires_grad_()
    leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_(), s, mask) for a, b, s, mask in parts]
    y = F.linear(x, weight, bias)
    for a, b, s, mask in leaves:
        dropped = x if mask is None else x * mask.keep * mask.scale
        y = y + s * dropped @ a.t() @ b.t()
    y.backward(g)
    return y.detach(), x.grad, [(a.grad, b.grad) for a, b, *_ in leaves]


@pytest.mark.parametrize("tile", [1, 2, N])
@pytest.mark.parametrize("black_box", [False, True])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_row_tiles_of_several_adapters_add_up(tile, black_box, probability):
    weight, bias, parts = op_parts(probability=probability)
    x, g = torch.randn(N, DIN, dtype=torch.float64), torch.randn(N, DOUT, dtype=torch.float64)
    y, dx, factors = autograd_result(weight, bias, parts, x, g)
    op = make_op(weight, bias, parts, (lambda t: F.linear(t, weight, bias)) if black_box else None)
    order = torch.randperm(N).split(tile)  # rows in any order, as a kept-row set hands them over
    for rows in order:
        assert relative_error(op.forward(x[rows], rows), y[rows]) <= ORDER_OF_SUMS[torch.float64]
        assert relative_error(op.backward(g[rows], x[rows], rows), dx[rows]) <= ORDER_OF_SUMS[torch.float64]
    for term, (da, db) in zip(op.terms, factors, strict=True):
        assert relative_error(term.grad_a, da) <= ORDER_OF_SUMS[torch.float64]
        assert relative_error(term.grad_b, db) <= ORDER_OF_SUMS[torch.float64]


def test_input_gradient_is_left_out_where_nobody_wants_it():
    weight, bias, parts = op_parts()
    x, g = torch.randn(N, DIN, dtype=torch.float64), torch.randn(N, DOUT, dtype=torch.float64)
    op = make_op(weight, bias, parts)
    assert op.backward(g, x, need_input=False) is None
    for term, (da, db) in zip(op.terms, autograd_result(weight, bias, parts, x, g)[2], strict=True):
        assert relative_error(term.grad_a, da) <= ORDER_OF_SUMS[torch.float64]
        assert relative_error(term.grad_b, db) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_feature_parts_of_a_layer_add_up(size):
    """``outputs`` and ``inputs`` cut a layer in pieces; together they are the layer, gradients included."""
    weight, bias, parts = op_parts()
    x, g = torch.randn(N, DIN, dtype=torch.float64), torch.randn(N, DOUT, dtype=torch.float64)
    y, dx, factors = autograd_result(weight, bias, parts, x, g)
    tolerance = ORDER_OF_SUMS[torch.float64]
    by_outputs, by_inputs = make_op(weight, bias, parts), make_op(weight, bias, parts)
    cuts = [slice(i, i + size) for i in range(0, DOUT, size)]
    pieces = [by_outputs.outputs(cut) for cut in cuts]
    assert relative_error(torch.cat([p.forward(x) for p in pieces], 1), y) <= tolerance
    total = sum(p.backward(g[:, cut], x) for p, cut in zip(pieces, cuts, strict=True))
    assert relative_error(total, dx) <= tolerance
    cuts = [slice(i, i + size) for i in range(0, DIN, size)]
    pieces = [by_inputs.inputs(cut) for cut in cuts]
    assert relative_error(sum(p.forward(x[:, cut]) for p, cut in zip(pieces, cuts, strict=True)) + bias, y) <= tolerance
    cat = torch.cat([p.backward(g, x[:, cut]) for p, cut in zip(pieces, cuts, strict=True)], 1)
    assert relative_error(cat, dx) <= tolerance
    for op in (by_outputs, by_inputs):
        for term, (da, db) in zip(op.terms, factors, strict=True):
            assert relative_error(term.grad_a, da) <= tolerance
            assert relative_error(term.grad_b, db) <= tolerance


def test_c22_a_black_box_s_own_tensor_is_not_written_to():
    kept = torch.randn(N, DOUT, dtype=torch.float64)
    before = kept.clone()
    _, _, parts = op_parts()
    make_op(None, None, parts, call=lambda t: kept).forward(torch.randn(N, DIN, dtype=torch.float64))
    assert torch.equal(kept, before)


def test_gradients_of_half_precision_factors_are_summed_in_float32():
    """4,096 rows whose contributions are equal: a bfloat16 running sum over tiles would stop growing at 256 of them."""
    rows = 4096
    a, b = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16)
    term = LoraTerm(a, b, 1.0, None, torch.zeros(1, 2), torch.zeros(3, 1))
    op = LinearOp(torch.zeros(3, 2, dtype=torch.bfloat16), terms=[term])
    x, g = torch.ones(8, 2, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16)
    for _ in range(rows // 8):
        op.backward(g, x, need_input=False)
    assert torch.equal(term.grad_a, torch.full((1, 2), 3.0 * rows))
    assert torch.equal(term.grad_b, torch.full((3, 1), 2.0 * rows))


@pytest.mark.usefixtures("poisoned")
def test_no_uninitialised_memory_leaks():
    got = results(lora_linear_apply, tensors(), (True,) * 4, 0.37, nn.Dropout(0.3))
    assert all(t.isfinite().all() for t in got)


def test_a_mask_applies_to_the_rows_it_is_asked_for():
    keep = torch.tensor([[True, False], [False, True], [True, True]])
    mask = DropMask(keep, 2.0)
    x = torch.tensor([[3.0, 5.0]])
    assert torch.equal(mask.apply(x, torch.tensor([1])), torch.tensor([[0.0, 10.0]]))
    assert torch.equal(mask.apply(x, slice(0, 1)), torch.tensor([[6.0, 0.0]]))
