"""Cross-entropy of a linear head without its logits: gradcheck, tiles, extreme logits, dtypes, bytes, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blocks._tolerances import ORDER_OF_SUMS, relative_error
from hf_memeff.memory import saved_tensor_bytes
from hf_memeff.ops.linear_cross_entropy import linear_cross_entropy

D = 5
ONE_LOGIT, FEW, ROW_AND_A_HALF, ALL = 4, 60, 4 * 1600, 2**24
TILES = (ONE_LOGIT, FEW, ROW_AND_A_HALF, ALL)


def case(rows=(2, 3), classes=11, bias=True, seed=0, dtype=torch.float64, ignored=1):
    """hidden, weight, bias, labels; the first ``ignored`` labels are -100."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, classes, rows, generator=generator)
    labels.view(-1)[:ignored] = -100
    return random(*rows, D), random(classes, D), random(classes) if bias else None, labels


def reference(hidden, weight, bias, labels, softcap=None, scale=1.0, ignore_index=-100):
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")


def value_and_gradient(function, hidden, *args, g=1.0, **kwargs):
    leaf = hidden.clone().requires_grad_()
    loss = function(leaf, *args, **kwargs)
    loss.backward(torch.tensor(g, dtype=loss.dtype))
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(bias, scale, softcap, tile_bytes):
    hidden, weight, shift, labels = case(rows=(3,), classes=7, bias=bias)
    rule = {"bias": shift, "softcap": softcap, "scale": scale, "tile_bytes": tile_bytes}
    assert torch.autograd.gradcheck(lambda h: linear_cross_entropy(h, weight, labels, **rule), hidden.requires_grad_())


@pytest.mark.parametrize("tile_bytes", [FEW, ROW_AND_A_HALF, ALL])
@pytest.mark.parametrize(("softcap", "scale"), list(itertools.product([None, 3.0], [1.0, -0.7])))
def test_any_tile_over_a_vocabulary_of_several_tiles(softcap, scale, tile_bytes):
    hidden, weight, bias, labels = case(rows=(7,), classes=1031)
    labels[1], labels[2] = 0, 1030  # the ends of the vocabulary
    rule = {"softcap": softcap, "scale": scale}
    expected = value_and_gradient(reference, hidden, weight, bias, labels, **rule)
    got = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias, tile_bytes=tile_bytes, **rule)
    for ours, theirs in zip(got, expected, strict=True):
        assert relative_error(ours, theirs) <= ORDER_OF_SUMS[torch.float64]


@pytest.mark.parametrize("ignore_index", [-100, -1, 4, 7777])
def test_ignored_rows_count_nothing_and_get_no_gradient(ignore_index):
    hidden, weight, bias, labels = case(ignored=0)
    labels[0, 1] = labels[1, 2] = ignore_index
    expected = value_and_gradient(reference, hidden, weight, bias, labels, ignore_index=ignore_index)
    got = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias, ignore_index=ignore_index)
    for ours, theirs in zip(got, expected, strict=True):
        assert relative_error(ours, theirs) <= ORDER_OF_SUMS[torch.float64]
    assert not got[1][labels == ignore_index].any()


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_c33_no_rows(rows):
    hidden, weight, bias, labels = case(rows=rows)
    loss, gradient = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias)
    assert loss == 0 and gradient.shape == hidden.shape


def test_all_rows_ignored():
    hidden, weight, bias, labels = case(ignored=6)
    loss, gradient = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("tile_bytes", [ONE_LOGIT, FEW, ALL])
@pytest.mark.parametrize("factor", [1e4, 1e-4])
def test_extreme_logits(factor, tile_bytes):
    hidden, weight, bias, labels = case()
    expected = value_and_gradient(reference, hidden * factor, weight, bias, labels)
    got = value_and_gradient(linear_cross_entropy, hidden * factor, weight, labels, bias=bias, tile_bytes=tile_bytes)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours, theirs) <= ORDER_OF_SUMS[torch.float64]


def test_a_label_that_is_almost_certain_keeps_its_small_gradient():
    """p = 1 - 2e-7: ``p - 1`` in float32 would be rounding noise; summed apart it keeps its digits."""
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[15.5], [0.0]])
    _, gradient = value_and_gradient(linear_cross_entropy, hidden, weight, torch.tensor([0]))
    _, exact = value_and_gradient(reference, hidden.double(), weight.double(), None, torch.tensor([0]))
    assert relative_error(gradient, exact) <= ORDER_OF_SUMS[torch.float32]


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c16_every_mix_of_dtypes(hidden_dtype, weight_dtype):
    hidden, weight, bias, labels = case(rows=(9,), classes=77)
    hidden, weight, bias = hidden.to(hidden_dtype), weight.to(weight_dtype), bias.to(weight_dtype)
    exact = value_and_gradient(reference, hidden.double(), weight.double(), bias.double(), labels)
    got = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias, tile_bytes=4 * 40)
    assert got[0].dtype == torch.float32 and got[1].dtype == hidden_dtype
    for ours, theirs in zip(got, exact, strict=True):
        assert relative_error(ours, theirs) <= max(ORDER_OF_SUMS[d] for d in (hidden_dtype, weight_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_logits_in_its_dtype_as_a_model_does(dtype):
    hidden, weight, bias, labels = case(rows=(9,), classes=77, dtype=torch.float32)
    exact = value_and_gradient(reference, hidden.double(), weight.double(), bias.double(), labels)
    with torch.autocast("cpu", dtype):
        stock = value_and_gradient(reference, hidden, weight, bias, labels)
        ours = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias)
    for got, theirs, best in zip(ours, stock, exact, strict=True):
        assert got.dtype == torch.float32
        assert 1e-5 < relative_error(got, best) <= 1.5 * relative_error(theirs, best) + 1e-4


def test_a_grad_scaler_s_factor_is_applied_in_backward():
    """The gradient of float16 hidden states is kept unscaled in float32: a scale of 2^16 lifts its smallest entries."""
    hidden, weight, bias, labels = case(rows=(9,), classes=77, dtype=torch.float16)
    weight = weight * 1e-4  # gradients near 1e-8, below float16's smallest number
    scaled = value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias, g=65536.0)[1].double() / 65536
    exact = value_and_gradient(reference, hidden.double(), weight.double(), bias.double(), labels)[1]
    assert relative_error(scaled, exact) <= ORDER_OF_SUMS[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_gradient_is_saved_and_only_if_it_is_wanted(dtype):
    hidden, weight, bias, labels = case(rows=(300,), classes=900, dtype=dtype)
    assert saved_tensor_bytes(lambda: linear_cross_entropy(hidden, weight, labels, bias=bias)) == 0
    hidden.requires_grad_()
    assert saved_tensor_bytes(lambda: linear_cross_entropy(hidden, weight, labels, bias=bias)) == 300 * D * 4


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return result


@pytest.mark.parametrize("tile_bytes", [2**14, 2**16])
def test_no_tensor_exceeds_the_tile(tile_bytes):
    hidden, weight, bias, labels = case(rows=(64,), classes=4001, dtype=torch.float32)
    with Largest() as seen:
        value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias, tile_bytes=tile_bytes, softcap=3.0)
    assert seen.bytes <= max(tile_bytes, weight.nbytes)  # logits whole would be 1 MB, the head is 80 kB


def test_double_backward_raises_and_says_so():
    hidden, weight, bias, labels = case()
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    (dh,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dh.sum().backward()


def test_it_changes_none_of_its_arguments():
    hidden, weight, bias, labels = case()
    copies = [t.clone() for t in (hidden, weight, bias, labels)]
    value_and_gradient(linear_cross_entropy, hidden, weight, labels, bias=bias, softcap=2.0, scale=0.5)
    assert all(torch.equal(t, c) for t, c in zip((hidden, weight, bias, labels), copies, strict=True))


def test_bad_input_is_refused():
    hidden, weight, bias, labels = case()
    trained = weight.clone().requires_grad_()
    wrong = {
        r"head whose weight or bias wants a gradient.*tiled_loss=\"never\"": (hidden, trained, labels, {}),
        r"got hidden \(2, 3, 5\), labels \(6,\)": (hidden, weight, labels.flatten(), {}),
        r"weight \(11, 4\)": (hidden, weight[:, :4], labels, {}),
        r"got tile_bytes=3, expected at least 4": (hidden, weight, labels, {"tile_bytes": 3}),
        r"got label 11, expected one in \[0, 11\)": (hidden, weight, labels.masked_fill(labels >= 0, 11), {}),
        r"got label -5, expected": (hidden, weight, labels.masked_fill(labels >= 0, -5), {}),
        r"got label -100, expected .*ignore_index=-1": (hidden, weight, labels, {"ignore_index": -1}),
    }
    for message, (h, w, ids, options) in wrong.items():
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(h, w, ids, **options)
    with pytest.raises(ValueError, match="weight or bias wants a gradient"):
        linear_cross_entropy(hidden, weight, labels, bias=bias.clone().requires_grad_())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tile_bytes", TILES)
def test_no_uninitialised_memory_leaks(tile_bytes):
    hidden, weight, bias, labels = case()
    rule = {"bias": bias, "softcap": 3.0, "tile_bytes": tile_bytes}
    got = value_and_gradient(linear_cross_entropy, hidden, weight, labels, **rule)
    assert all(t.isfinite().all() for t in got)
