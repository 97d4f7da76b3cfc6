"""Published cases (a): gradient checkpointing in a user's own loop, and the contract of the autograd graph."""

import dataclasses
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging as transformers_logging

from helpers import fill_adapters, loss_and_gradients, tiny_model, token_batch, worst_relative_error
from hf_memeff import MespConfig, SageConfig, attach, memeff_status
from integration._training import LORA, adapted, logged

METHODS = {
    "mesp": MespConfig,
    "sage": partial(SageConfig, token_budget=1.0),
    "sparse sage": partial(SageConfig, token_budget=0.4, sink_tokens=1, dense_layers=()),
}
"""The first two have LoRA's gradients; what the third has must not depend on what surrounds the model."""

methods = pytest.mark.parametrize("method", METHODS)
REENTRANT = {"unset": None, "True": {"use_reentrant": True}, "False": {"use_reentrant": False}}


def checkpointed(config_cls, keywords, order, **settings):
    """An adapted model on which checkpointing was switched on before or after it was wrapped."""
    base = tiny_model()
    if order == "before":
        base.activation_checkpointing_enable(keywords)
    model = get_peft_model(base, config_cls(**{**LORA, **settings}))
    fill_adapters(model)
    if order == "after":
        model.activation_checkpointing_enable(keywords)
    return model


def right_gradients(method, batch, **settings):
    """Loss and gradients without checkpointing or hooks: LoRA's, or those of the sparse method itself."""
    config_cls = METHODS[method] if method == "sparse sage" else LoraConfig
    return loss_and_gradients(adapted(config_cls, **settings), batch)


def memeff_model(way, keywords, order):
    """The same through MespConfig, or through `attach` on a plain LoRA model."""
    if way == "config":
        return checkpointed(MespConfig, keywords, order)
    model = checkpointed(LoraConfig, keywords, order)
    attach(model)
    return model


@pytest.mark.parametrize("way", ["config", "attach"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("keywords", REENTRANT.values(), ids=REENTRANT)
def test_c01_frozen_embeddings_do_not_cut_off_the_gradients(keywords, order, way):
    loss, expected = loss_and_gradients(adapted(), token_batch())
    ours, gradients = loss_and_gradients(memeff_model(way, keywords, order), token_batch())
    assert abs(loss - ours) <= 1e-6 and len(gradients) == 28
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0 and (gradient - expected[name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("keywords", REENTRANT.values(), ids=REENTRANT)
@pytest.mark.parametrize("method", ["sage", "sparse sage"])
def test_c01_nor_those_of_sage(method, keywords, order):
    loss, expected = right_gradients(method, token_batch())
    ours, gradients = loss_and_gradients(checkpointed(METHODS[method], keywords, order), token_batch())
    assert abs(loss - ours) <= 1e-6 and len(gradients) == 28
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0 and (gradient - expected[name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("way", ["lora", "config", "attach"])
def test_c01_one_line_instead_of_transformers_warning_for_the_cache(nothing_said, way):
    transformers_logging.warning_once.cache_clear()
    model = adapted() if way == "lora" else memeff_model(way, None, "after")
    model.activation_checkpointing_enable({"use_reentrant": False})
    with logged("hf_memeff") as ours, logged("transformers") as theirs:
        for _ in range(2):
            loss_and_gradients(model, token_batch())  # use_cache is at its default, which is on
    about_cache = [message for message in theirs if "incompatible with gradient checkpointing" in message]
    if way == "lora":
        assert len(about_cache) == 1 and not ours
    else:
        assert not about_cache and len(ours) == 1 and "checkpointing" in ours[0] and "cache" in ours[0]


@methods
def test_c02_adapters_that_lora_leaves_dead_are_trained(method):
    """Reentrant checkpointing without the hook on the embeddings: the head learns, the loss falls, no adapter moves."""
    stock, ours = (
        checkpointed(cls, {"use_reentrant": True}, "after", modules_to_save=["lm_head"])
        for cls in (LoraConfig, METHODS[method])
    )
    for model in (stock, ours):
        model.disable_input_require_grads()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        _, dead = loss_and_gradients(stock, token_batch())
    assert not [name for name in dead if "lora_" in name]
    _, expected = right_gradients(method, token_batch(), modules_to_save=["lm_head"])
    _, gradients = loss_and_gradients(ours, token_batch())
    assert worst_relative_error(gradients, expected) <= 1e-5
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@methods
@pytest.mark.parametrize("keywords", REENTRANT.values(), ids=REENTRANT)
def test_c04_random_numbers_of_the_forward_are_those_of_the_re_run(keywords, method):
    expected = right_gradients(method, token_batch(), lora_dropout=0.3)
    ours = loss_and_gradients(checkpointed(METHODS[method], keywords, "after", lora_dropout=0.3), token_batch())
    assert abs(expected[0] - ours[0]) <= 1e-6 and worst_relative_error(ours[1], expected[1]) <= 1e-5


@pytest.mark.parametrize("saliency", ["random", "attention", "gradient", "value_norm"])
def test_c04_the_choice_of_tokens_is_the_same_under_checkpointing_and_in_a_second_call(saliency):
    """Nothing counts calls: gradients are equal to the bit, and another choice would change them."""
    settings = {"token_budget": 0.3, "sink_tokens": 1, "dense_layers": (), "saliency": saliency, "lora_dropout": 0.2}
    plain = adapted(SageConfig, **settings)
    expected = loss_and_gradients(plain, token_batch())
    assert worst_relative_error(loss_and_gradients(plain, token_batch())[1], expected[1]) == 0
    for use_reentrant in (True, False):
        model = checkpointed(SageConfig, {"use_reentrant": use_reentrant}, "after", **settings)
        loss, gradients = loss_and_gradients(model, token_batch())
        assert loss == expected[0] and worst_relative_error(gradients, expected[1]) == 0
    other = loss_and_gradients(adapted(SageConfig, **{**settings, "token_budget": 0.4}), token_batch())
    assert worst_relative_error(other[1], expected[1]) > 1e-3


def test_c04_arguments_that_arrive_through_hooks_are_not_lost():
    """aLoRA hands its offsets to the layers by temporary hooks, which a re-run would not see."""
    batch = token_batch()
    tokens = batch["input_ids"][0, 5:7].tolist()
    batch["input_ids"][1, 9:11] = torch.tensor(tokens)
    settings = {"alora_invocation_tokens": tokens, "target_modules": ["q_proj", "v_proj"]}
    expected = loss_and_gradients(adapted(**settings), batch)
    model = adapted(MespConfig, **settings)
    assert [(b.path, "aLoRA" in b.reason) for b in memeff_status(model).blocks] == [("off", True)] * 2
    loss, gradients = loss_and_gradients(model, batch)
    assert abs(loss - expected[0]) <= 1e-6 and worst_relative_error(gradients, expected[1]) <= 1e-5


def varied_batches(count):
    """Batches of one shape: other tokens, other padding, other labels."""
    for seed in range(count):
        batch = token_batch(padding=("left", "right")[seed % 2], seed=seed)
        batch["labels"][:, : seed % 7] = -100
        yield batch


@methods
def test_c05_saved_tensors_depend_on_shapes_and_settings_alone(method):
    model = adapted(METHODS[method], lora_dropout=0.1, target_modules=["q_proj", "down_proj"]).train()
    seen = []
    for batch in varied_batches(20):
        saved: list = []

        def note(tensor, saved=saved):
            saved.append((tensor.shape, tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(**batch)
        seen.append(saved)
    assert len(seen[0]) > 10 and all(saved == seen[0] for saved in seen)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_c05_blocks_run_inside_an_outer_checkpoint(use_reentrant):
    model, stock = adapted(MespConfig, lora_dropout=0.1), adapted(lora_dropout=0.1)

    def step(batch):
        # the reentrant variant wants an input with a gradient
        embedded = model.get_input_embeddings()(batch["input_ids"]).requires_grad_()
        rest = {name: batch[name] for name in ("attention_mask", "labels")}
        return checkpoint(lambda x: model(inputs_embeds=x, **rest).loss, embedded, use_reentrant=use_reentrant)

    for batch in varied_batches(20 if not use_reentrant else 3):
        _, expected = loss_and_gradients(stock, batch)
        model.train()
        torch.manual_seed(11)
        step(batch).backward()
        gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        assert worst_relative_error(gradients, expected) <= 1e-5
        model.zero_grad()


@methods
def test_c05_checkpointed_steps_with_random_batches(method):
    """Non-reentrant checkpointing compares shapes and dtypes of what the two passes save."""
    model = checkpointed(METHODS[method], {"use_reentrant": False}, "after", lora_dropout=0.1)
    plain = adapted(METHODS[method], lora_dropout=0.1)
    for batch in varied_batches(20):
        _, expected = loss_and_gradients(plain, batch)
        assert worst_relative_error(loss_and_gradients(model, batch)[1], expected) <= 1e-5


class Elsewhere:
    """Saved-tensor hooks that keep each tensor's bytes out of torch and hand back another one with the same values."""

    def __init__(self):
        self.packed = self.unpacked = 0

    def __call__(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed += 1
        return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape

    def unpack(self, packed):
        self.unpacked += 1
        content, dtype, shape = packed
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)


@methods
@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_c06_saved_tensors_may_be_moved_elsewhere(tmp_path, store, dropout, method):
    _, expected = right_gradients(method, token_batch(), lora_dropout=dropout)
    options = {"activation_store": store, "activation_store_dir": str(tmp_path) if store == "disk" else None}
    model = adapted(METHODS[method], lora_dropout=dropout, **options).train()
    moved = Elsewhere()
    torch.manual_seed(11)
    with moved():
        loss = model(**token_batch()).loss
    assert not stashed_tensors(loss.grad_fn)
    loss.backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    assert moved.packed == moved.unpacked > 0 and worst_relative_error(gradients, expected) <= 1e-5


def stashed_tensors(node):
    """Tensors that a hand-written Function of the graph keeps as attributes, where no saved-tensor hook sees them."""
    found, seen, waiting = [], set(), [node]
    functions = 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        for name, value in getattr(node, "__dict__", {}).items():
            functions += 1
            fields = vars(value).items() if dataclasses.is_dataclass(value) else [(name, value)]
            leaves = [leaf for _, field in fields for leaf in (field if isinstance(field, (tuple, list)) else [field])]
            found += [(type(node).__name__, name) for leaf in leaves if isinstance(leaf, Tensor)]
    assert functions > 0
    return found


def test_c06_the_search_for_stashed_tensors_finds_one():
    class Stash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.detach()
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    assert stashed_tensors(Stash.apply(torch.ones(2, requires_grad=True)).grad_fn) == [("StashBackward", "kept")]


@methods
def test_c09_dropout_and_biases_stay_on_the_fast_path(method):
    expected = right_gradients(method, token_batch(), base=tiny_model("qwen2"), lora_dropout=0.1)
    model = adapted(METHODS[method], tiny_model("qwen2"), lora_dropout=0.1, strict=True)
    status = memeff_status(model)
    assert {(block.path, block.reason) for block in status.blocks} == {("structured", "")}
    assert {(linear.path, linear.reason) for linear in status.linears} == {("structured", "")}
    assert len(status.blocks) == 2 and len(status.linears) == 14
    loss, gradients = loss_and_gradients(model, token_batch())
    assert abs(loss - expected[0]) <= 1e-6 and worst_relative_error(gradients, expected[1]) <= 1e-5
