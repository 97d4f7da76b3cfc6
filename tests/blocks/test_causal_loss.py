"""The tiled loss is the model's own loss, without its logits (C39, C41)."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blocks._causal_loss import BATCH, compare, loss_path
from blocks._models import LAYOUTS, LENGTH, adapted, engine, errors, step
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from blocks._unknown import PLAIN, UNKNOWN, unknown_model
from helpers import token_batch
from hf_memeff.blocks.attach import attach_blocks
from hf_memeff.blocks.options import EngineOptions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", LAYOUTS)
def test_the_tiled_loss_is_the_model_s_own(family, dtype):
    """Gemma has a softcap, Granite a logit divisor, all a label shift; some tie their head to the embedding."""
    model = adapted(family, dtype)
    assert compare(model, strict=True) <= ORDER_OF_SUMS[dtype]


@pytest.mark.parametrize("family", [family for family in UNKNOWN if family != "opt"])
def test_models_without_a_layout_have_their_loss_tiled_too(family):
    """Among them heads with a bias (Phi) and with a scale (Cohere)."""
    assert compare(unknown_model(family, torch.float32, 0.0)) <= ORDER_OF_SUMS[torch.float32]


@pytest.mark.parametrize("tile_bytes", [4, 1000, 2**30])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tiles_of_any_size(family, tile_bytes):
    model = adapted(family, torch.float32)
    assert compare(model, loss_tile_bytes=tile_bytes) <= ORDER_OF_SUMS[torch.float32]


ARGUMENTS = {
    "count as int": {"num_items_in_batch": 77},
    "count as tensor": {"num_items_in_batch": torch.tensor(77)},
    "own ignore_index": {"ignore_index": 5, "labels": BATCH["labels"].masked_fill(BATCH["labels"] < 0, 5)},
    "shifted labels": {"shift_labels": torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(2))},
    "shifted labels, flat": {"shift_labels": torch.randint(0, 128, (2 * LENGTH,))},
    "one label": {"labels": torch.full((2, LENGTH), -100).index_fill(1, torch.tensor([4]), 9)},
    "labels in another integer type": {"labels": BATCH["labels"].to(torch.int64).contiguous()},
    "smoothing word it ignores": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_of_the_loss(what, dtype):
    model = adapted("llama", dtype)
    assert compare(model, BATCH | ARGUMENTS[what]) <= ORDER_OF_SUMS[dtype]


def test_all_labels_ignored():
    """transformers' mean over nothing is NaN; with a count it is zero, and so are the gradients."""
    model = adapted("llama", torch.float32)
    batch = BATCH | {"labels": torch.full((2, LENGTH), -100)}
    assert model(**batch).loss.isnan()
    with engine(model):
        assert model(**batch).loss.isnan()
        loss = model(**batch, num_items_in_batch=3).loss
        loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_rounds_no_more_than_the_model_s_own_loss(autocast):
    model = adapted("llama", torch.float32)
    exact = step(model, BATCH)
    results = []
    for mode in ("never", "auto"):
        with engine(model, tiled_loss=mode), torch.autocast("cpu", autocast):
            results.append(errors(step(model, BATCH), exact))
    own, tiled = (sum(found.values()) / len(found) for found in results)
    assert tiled <= 1.5 * own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_base(dtype):
    model = adapted("llama", dtype, adapter_dtype=torch.float32)
    with engine(model, tiled_loss="never"):
        expected = step(model, BATCH)
    with engine(model):
        got = step(model, BATCH)
    assert got.loss.dtype == expected.loss.dtype == torch.float32
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[dtype]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_auxiliary_loss_of_a_mixture_of_experts(family):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = unknown_model(family, torch.float32, 0.0, **changes)
    without = step(unknown_model(family, torch.float32, 0.0, router_aux_loss_coef=0.5), BATCH)
    assert relative_error(step(model, BATCH).loss, without.loss) > 1e-2
    assert compare(model) <= ORDER_OF_SUMS[torch.float32]
    with engine(model):
        out = model(**BATCH)
        assert out.aux_loss.ndim == 0 and len(out.router_logits) == 2


class Largest(TorchDispatchMode):
    """Elements of the largest tensor any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_c39_whole_logits_are_never_built(family):
    rows, classes = 2 * 96, 7001
    model = adapted(family, torch.float32, overrides={"vocab_size": classes})
    batch = token_batch(2, 96)
    seen = {}
    for mode in ("never", "auto"):
        with engine(model, tiled_loss=mode, strict=True), Largest() as largest:
            model(**batch).loss.backward()
        seen[mode] = largest.elements
    assert seen["never"] >= (rows - 2) * classes  # the probe sees logits where there are some
    assert seen["auto"] <= max(classes * 64, 2**18)  # the head's weight, or the smallest automatic tile (1 MiB)


def test_c41_accumulated_micro_batches_are_one_batch():
    """Uneven labels over micro-batches: the count of the whole batch normalises each part."""
    model = adapted("llama", torch.float32)
    whole = token_batch(4, LENGTH, "right")
    whole["labels"][1, :15] = -100
    whole["labels"][3, 4:] = -100
    count = int((whole["labels"][:, 1:] != -100).sum())
    expected = step(model, whole)
    with engine(model):
        model.zero_grad()
        for rows in (slice(0, 1), slice(1, 4)):
            model(**{k: v[rows] for k, v in whole.items()}, num_items_in_batch=count).loss.backward()
    for name, gradient in expected.gradients.items():
        assert relative_error(model.get_parameter(name).grad, gradient) <= ORDER_OF_SUMS[torch.float32]


def test_a_model_that_is_not_causal():
    config = transformers.LlamaConfig(**PLAIN, num_labels=3, num_key_value_heads=2)
    torch.manual_seed(0)
    base = transformers.LlamaForSequenceClassification(config)
    model = adapted(model=base, dtype=torch.float32, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    batch = {"input_ids": BATCH["input_ids"], "labels": torch.tensor([0, 2])}
    expected = step(model, batch)
    with engine(model):
        assert loss_path(model) == ("logits", "not a causal language model")
        got = step(model, batch)
        assert model(**batch).logits.shape == (2, 3)
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float32]
    with pytest.raises(
        ValueError, match=r'got tiled_loss="always" on LlamaForSequenceClassification, expected a causal'
    ):
        attach_blocks(model.get_base_model(), EngineOptions(tiled_loss="always"))


def test_a_failing_step_leaves_the_model_as_it_was():
    model = adapted("llama", torch.float32)
    expected = model.eval()(**BATCH).logits
    model.train()
    with engine(model):
        wrong = BATCH | {"labels": BATCH["labels"].clamp_min(0) + 128}
        with pytest.raises(ValueError, match=r"got label .*, expected one in \[0, 128\)"):
            model(**wrong)
        head = model.get_base_model().lm_head
        assert "forward" not in head.__dict__ and "_loss_function" not in model.get_base_model().__dict__
        step(model, BATCH)
        assert torch.equal(model.eval()(**BATCH).logits, expected)
