"""Which calls are tiled, which get whole logits, and that both are the model's own (C38, C40, C41)."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
import torch.nn.functional as F
import transformers

from blocks._causal_loss import BATCH, loss_path
from blocks._models import LENGTH, adapted, engine, errors, step
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from blocks._unknown import unknown_model
from hf_memeff.blocks import block
from hf_memeff.blocks.attach import attach_blocks
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.blocks.tiled_output import LogitsNotComputedError


@pytest.mark.parametrize(
    ("mode", "training", "tiled"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("always", True, True),
        ("always", False, True),
        ("never", True, False),
    ],
)
def test_c38_when_logits_are_kept(mode, training, tiled):
    model = adapted("llama", torch.float32).train(training)
    own = model(**BATCH)
    with engine(model, tiled_loss=mode), torch.no_grad() if not training else torch.enable_grad():
        out = model(**BATCH)
        assert relative_error(out.loss, own.loss) <= ORDER_OF_SUMS[torch.float32]
        if tiled:
            with pytest.raises(LogitsNotComputedError):
                _ = out.logits
        else:
            assert relative_error(out.logits, own.logits) <= ORDER_OF_SUMS[torch.float32]
        # without labels there is no loss to tile, and logits are what is asked for
        assert (
            relative_error(model(input_ids=BATCH["input_ids"]).logits, model(input_ids=BATCH["input_ids"]).logits) == 0
        )
        assert model(input_ids=BATCH["input_ids"]).logits.shape == (2, LENGTH, 128)


def custom_loss(logits, labels, vocab_size, **kwargs):
    """A loss that looks at whole logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.3) + logits.std()


def whole_logit_models():
    """Models whose logits are needed, and why."""
    base = adapted("llama", torch.float32)
    base.get_base_model().loss_function = custom_loss
    trained = adapted("llama", torch.float32, target_modules=["q_proj"], modules_to_save=["lm_head"])
    lora_head = adapted("llama", torch.float32, target_modules=["q_proj", "lm_head"])
    unfrozen = adapted("llama", torch.float32)
    unfrozen.get_base_model().lm_head.weight.requires_grad_(True)
    patched = adapted("llama", torch.float32)
    head = patched.get_base_model().lm_head
    head.forward = lambda h: 2.0 * F.linear(h, head.weight)
    return {
        "a loss function of its own": base,
        "ModulesToSaveWrapper": trained,
        "the head is a Linear (adapted, trained or replaced)": lora_head,
        "the head is trained": unfrozen,
        "the head's forward is replaced": patched,
    }


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("reason", list(whole_logit_models()))
def test_c40_heads_and_losses_that_need_logits_get_them(reason, mode, caplog, monkeypatch):
    """Correct through whole logits, and said once."""
    monkeypatch.setattr(block, "_said", set())
    model = whole_logit_models()[reason]
    expected = step(model, BATCH)
    with engine(model, tiled_loss=mode), caplog.at_level(logging.WARNING, logger="hf_memeff"):
        path, why = loss_path(model)
        got = [step(model, BATCH) for _ in range(3)]
        assert model(**BATCH).logits.shape == (2, LENGTH, 128)
    assert path == "logits" and reason in why
    for one in got:
        assert max(errors(one, expected).values()) <= ORDER_OF_SUMS[torch.float32]
    said = [r.message for r in caplog.records if "whole logits" in r.message]
    assert len(said) == 1 and why in said[0]


def test_logits_to_keep():
    model = adapted("llama", torch.float32)
    batch = BATCH | {"logits_to_keep": 5, "labels": BATCH["labels"][:, :5]}
    expected = step(model, batch)
    with engine(model):
        got = step(model, batch)
        assert model(**batch).logits.shape == (2, 5, 128)
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float32]


@pytest.mark.parametrize("how", ["keyword", "position", "config"])
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_tuple_holds_the_logits(mode, how, caplog, monkeypatch):
    """A tuple has no attribute that could refuse to be read, so that ``return_dict=False`` is not tiled."""
    monkeypatch.setattr(block, "_said", set())
    model = unknown_model("bloom", torch.float32, 0.0)  # among the models with return_dict in their signature
    base = model.get_base_model()
    names = list(inspect.signature(base.forward).parameters)
    named = BATCH | ({} if how == "config" else {"return_dict": False})
    call = [named.get(n) for n in names[: names.index("return_dict") + 1]] if how == "position" else []
    base.config.return_dict = how != "config"
    expected = base(*call, **({} if call else named))
    with engine(model, tiled_loss=mode), caplog.at_level(logging.WARNING, logger="hf_memeff"):
        assert loss_path(model)[0] == ("logits" if how == "config" else "tiled")
        got = [base(*call, **({} if call else named)) for _ in range(2)]
    assert type(expected) is tuple and expected[1].shape == (2, LENGTH, 128)
    for loss, logits, *rest in got:
        assert relative_error(loss, expected[0]) <= ORDER_OF_SUMS[torch.float32]
        assert relative_error(logits, expected[1]) <= ORDER_OF_SUMS[torch.float32]
        assert not any(isinstance(r, torch.Tensor) for r in rest)
    said = [r.message for r in caplog.records if "whole logits" in r.message]
    assert len(said) == 1 and "return_dict=False" in said[0]


def test_asking_for_an_output_overrides_a_config_with_tuples():
    model = unknown_model("bloom", torch.float32, 0.0)
    base = model.get_base_model()
    base.config.return_dict = False
    with engine(model):
        assert base(**BATCH)[1].shape == (2, LENGTH, 128)
        with pytest.raises(LogitsNotComputedError):
            _ = base(**BATCH, return_dict=True).logits


def test_labels_by_position():
    model = adapted("llama", torch.float32).get_base_model()
    names = list(inspect.signature(model.forward).parameters)
    arguments = [BATCH.get(name) for name in names[: names.index("labels") + 1]]
    expected = model(*arguments).loss
    attach_blocks(model, EngineOptions())
    out = model(*arguments)
    assert relative_error(out.loss, expected) <= ORDER_OF_SUMS[torch.float32]
    with pytest.raises(LogitsNotComputedError):
        _ = out.logits


def test_c41_the_signature_that_trainers_read_is_unchanged(tmp_path):
    model = adapted("llama", torch.float32)
    base = model.get_base_model()
    before = inspect.signature(base.forward), inspect.signature(type(base).forward), inspect.signature(model.forward)
    with engine(model):
        after = inspect.signature(base.forward), inspect.signature(type(base).forward), inspect.signature(model.forward)
        trainer = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
        )
        assert trainer.model_accepts_loss_kwargs
        trainer._set_signature_columns_if_needed()
        assert {"input_ids", "attention_mask", "labels"} <= set(trainer._signature_columns)
    assert after == before


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_generate_while_attached(family, training):
    """In training mode too, as GRPO samples; greedy, so that tokens can be compared."""
    model = adapted(family, torch.float32, overrides={"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0})
    model.train(training)
    ids = BATCH["input_ids"][:, :7]
    arguments = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(input_ids=ids, **arguments)
    for mode in ("auto", "always"):
        with engine(model, tiled_loss=mode):
            assert torch.equal(model.generate(input_ids=ids, **arguments), expected)
            assert torch.equal(model.generate(input_ids=ids, use_cache=False, **arguments), expected)
    assert expected.shape[1] > 7
