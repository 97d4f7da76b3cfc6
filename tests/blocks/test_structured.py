"""The structured block as an autograd citizen: what it saves, hooks, checkpoints, repeated backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from blocks._models import LENGTH, adapted, engine, errors, step, worst_error
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from helpers import token_batch
from hf_memeff.memory import saved_tensor_bytes

TOLERANCE = ORDER_OF_SUMS[torch.float64]


def gradients_of(model):
    """Gradients by name; they are cleared."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def worst(got, expected):
    assert set(got) == set(expected)
    return max(relative_error(got[n], g) for n, g in expected.items())


def test_a_block_saves_its_input_and_nothing_that_grows_with_the_batch():
    """The second batch has as many tokens again: each block's share grows by its input alone."""
    model = adapted("llama", torch.float32, lora_dropout=0.1)
    sizes = []
    with engine(model, strict=True, tiled_loss="never"):
        for rows in (2, 4):
            ids = token_batch(rows, LENGTH)["input_ids"]
            core = model.get_base_model().model
            sizes.append(saved_tensor_bytes(lambda ids=ids, core=core: core(input_ids=ids), exclude=model))
    block_input = 2 * LENGTH * 64 * 4
    norm = 2 * block_input  # the model's last norm, outside the blocks: its input in float32 and the normed rows
    assert sizes[1] - sizes[0] <= 2 * block_input + norm + 4096
    stock = saved_tensor_bytes(lambda: core(input_ids=ids), exclude=model)
    assert stock > 5 * sizes[1]


def test_c15_no_float32_copy_of_a_bfloat16_input_is_saved():
    model = adapted("llama", torch.bfloat16, adapter_dtype=torch.float32, lora_dropout=0.1)
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    layer = model.get_base_model().model.layers[0]
    h = torch.randn(2, LENGTH, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.get_base_model().model.rotary_emb(h, torch.arange(LENGTH)[None])
    with engine(model, strict=True), torch.autocast("cpu", torch.bfloat16), hooks:
        layer(h, position_embeddings=rotary)
    wide = [t.shape for t in packed if t.shape[:2] == h.shape[:2] and t.shape[-1] == 64]
    assert len(wide) == 1 and not any(t.dtype == torch.float32 and t.numel() >= h.numel() for t in packed)


def test_c05_what_is_saved_depends_on_shapes_alone():
    """Number, order, shape and dtype of saved tensors for batches of different content."""
    model = adapted("llama", lora_dropout=0.1)
    seen = set()
    with engine(model, strict=True, tiled_loss="never"):
        for seed in range(4):
            packed = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, packed=packed: packed.append((t.shape, t.dtype)) or t, lambda t: t
            ):
                model(input_ids=token_batch(2, LENGTH, seed=seed)["input_ids"])
            seen.add(tuple(packed))
    assert len(seen) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_c06_saved_tensors_pass_through_the_users_hooks(family):
    """Hooks that move what is saved elsewhere and back, as activation offloading does, nested in others."""
    model, batch = adapted(family, lora_dropout=0.2), token_batch(2, LENGTH)
    expected = step(model, batch)
    inner, outer = [], []

    def away(log):
        def pack(tensor):
            log.append(tensor.shape)
            return tensor.detach().clone(), tensor.requires_grad

        return pack

    def back(packed):
        return packed[0].clone()

    hooks = [torch.autograd.graph.saved_tensors_hooks(away(log), back) for log in (outer, inner)]
    with engine(model, strict=True), hooks[0], hooks[1]:
        got = step(model, batch)
    assert max(errors(got, expected).values()) <= TOLERANCE
    assert inner.count((2, LENGTH, 64)) >= 2  # each block's input
    assert not outer  # torch hands a tensor to the innermost hooks alone


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_c06_hooks_around_a_step_with_a_store(family, store, tmp_path):
    from blocks.test_block_paths import unknown_model

    model = unknown_model("opt") if family == "opt" else adapted("llama", lora_dropout=0.2)
    batch = token_batch(2, LENGTH)
    expected = step(model, batch)
    folder = str(tmp_path) if store == "disk" else None
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    with engine(model, activation_store=store, activation_store_dir=folder), hooks:
        got = step(model, batch)
    assert max(errors(got, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_c01_a_checkpoint_around_the_whole_model(family, reentrant, dropout):
    model, batch = adapted(family, lora_dropout=dropout), token_batch(2, LENGTH)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    results = []
    for attached in (False, True):
        leaf = embedded.clone().requires_grad_()  # the reentrant variant needs an input that wants a gradient

        def run(h):
            return model(inputs_embeds=h, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss

        with engine(model, strict=True) if attached else contextlib.nullcontext():
            torch.manual_seed(11)
            loss = checkpoint(run, leaf, use_reentrant=reentrant)
            loss.backward()
        results.append({**gradients_of(model), "input": leaf.grad, "loss": loss.detach()})
    assert worst(results[1], results[0]) <= TOLERANCE


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("reentrant", [False, True, None])
def test_c01_transformers_own_checkpointing_is_absorbed(reentrant, order):
    model, batch = adapted("llama", lora_dropout=0.2), token_batch(2, LENGTH)
    plain = step(model, batch)
    kwargs = None if reentrant is None else {"use_reentrant": reentrant}

    def switch_on():
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    if order == "before":
        switch_on()
    with engine(model, strict=True):
        if order == "after":
            switch_on()
        got = step(model, batch)
    assert max(errors(got, plain).values()) <= TOLERANCE


def test_c05_checkpointed_steps_with_random_batches():
    """Twenty batches of other content under the non-reentrant checkpoint, which compares what is saved."""
    model = adapted("llama", torch.float32, lora_dropout=0.1)
    with engine(model, strict=True):
        for seed in range(20):
            batch = token_batch(2, 9, seed=seed)
            checkpoint(lambda b: model(**b).loss, batch, use_reentrant=False).backward()
    assert all(g.isfinite().all() for g in gradients_of(model).values())


def test_double_backward_raises_and_says_so():
    model, batch = adapted("llama"), token_batch(2, LENGTH)
    factor = next(p for n, p in model.named_parameters() if "lora_B" in n)
    with engine(model, strict=True):
        (gradient,) = torch.autograd.grad(model(**batch).loss, factor, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_backward_twice_gives_the_same_twice():
    model, batch = adapted("gemma2", lora_dropout=0.2), token_batch(2, LENGTH)
    with engine(model, strict=True):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        torch.rand(5)  # other random numbers drawn in between must not matter
        loss.backward()
        second = gradients_of(model)
        assert all(torch.equal(second[n], g) for n, g in first.items())
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_two_forwards_before_one_backward():
    """As DPO and reward models do."""
    model = adapted("llama", lora_dropout=0.2)
    batches = [token_batch(2, LENGTH, "left", seed=1), token_batch(3, 9, seed=2)]
    results = []
    for attached in (False, True):
        with engine(model, strict=True) if attached else contextlib.nullcontext():
            torch.manual_seed(4)
            sum(model(**batch).loss for batch in batches).backward()
        results.append(gradients_of(model))
    assert worst(results[1], results[0]) <= TOLERANCE


def test_gradients_accumulate_over_backward_passes():
    model = adapted("llama")
    batches = [token_batch(2, LENGTH, seed=s) for s in (1, 2)]
    results = []
    for attached in (False, True):
        with engine(model, strict=True) if attached else contextlib.nullcontext():
            for batch in batches:
                model(**batch).loss.backward()
        results.append(gradients_of(model))
    assert worst(results[1], results[0]) <= TOLERANCE


def test_weights_changed_between_forward_and_backward_are_refused():
    model, batch = adapted("llama"), token_batch(2, LENGTH)
    with engine(model, strict=True):
        loss = model(**batch).loss
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_B" in n).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_on_parameters_run_once_in_a_step():
    """DDP and fused optimizers hang on them."""
    model, batch = adapted("llama"), token_batch(2, LENGTH)
    fired = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    with engine(model, strict=True):
        model(**batch).loss.backward()
    assert sorted(fired) == sorted(n for n, p in model.named_parameters() if p.requires_grad)


def test_autocast_of_the_forward_holds_in_backward():
    """``backward`` runs outside of the ``autocast`` block, as PyTorch recommends."""
    model, batch = adapted("llama", torch.float32), token_batch(2, LENGTH)
    results = []
    for inside in (True, False):
        with engine(model, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        results.append(gradients_of(model))
    assert all(torch.equal(results[1][n], g) for n, g in results[0].items())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_uninitialised_memory_leaks(family):
    model, batch = adapted(family), token_batch(2, LENGTH, "right")
    expected = step(model, batch)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    try:
        assert torch.empty(3).isnan().all()
        with engine(model, strict=True, mlp_tile_tokens=5):
            got = step(model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(errors(got, expected).values()) <= TOLERANCE


def test_parameters_of_the_layer_are_untouched_by_a_step():
    model, batch = adapted("llama"), token_batch(2, LENGTH)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert worst_error(model, batch) <= TOLERANCE
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
