"""The tiled loss is the model's own loss, without its logits (C38, C39, C41)."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.utils.operations import convert_outputs_to_fp32, convert_to_fp32
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from blocks._models import LAYOUTS, LENGTH, adapted, engine, errors, step
from blocks._tolerances import ORDER_OF_SUMS, relative_error
from blocks.test_block_paths import PLAIN, UNKNOWN
from helpers import token_batch
from hf_memeff.blocks import block, causal_loss
from hf_memeff.blocks.attach import attach_blocks, engine_status
from hf_memeff.blocks.options import EngineOptions
from hf_memeff.blocks.tiled_output import LogitsNotComputedError

BATCH = token_batch(2, LENGTH, "right")


def unknown(family, dtype=torch.float32, **changes):
    """A model without a named layout: its loss is tiled all the same."""
    config, targets = UNKNOWN[family]
    config = type(config).from_dict({**config.to_dict(), "torch_dtype": None, "dtype": None, **changes})
    torch.manual_seed(0)
    return adapted(
        model=AutoModelForCausalLM.from_config(config, dtype=dtype), target_modules=targets, adapter_dtype=dtype
    )


def loss_path(model):
    report = engine_status(model.get_base_model()).tiled_loss
    return report.path, report.reason


def compare(model, batch=None, expected_path="tiled", **options):
    """Largest relative error of loss and gradients, tiled against the model's own loss, both with the engine on."""
    batch = BATCH if batch is None else batch
    with engine(model, tiled_loss="never"):
        expected = step(model, batch)
    with engine(model, **options):
        assert loss_path(model)[0] == expected_path
        got = step(model, batch)
    return max(errors(got, expected).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", LAYOUTS)
def test_the_tiled_loss_is_the_model_s_own(family, dtype):
    """Gemma has a softcap, Granite a logit divisor, all a label shift; some tie their head to the embedding."""
    model = adapted(family, dtype)
    assert compare(model, strict=True) <= ORDER_OF_SUMS[dtype]


def test_a_head_that_the_check_cannot_reach_runs_on_whole_logits():
    """OPT calls its decoder past its backbone, so that the check of its head fails: no tiling, LoRA's gradients."""
    model = unknown("opt")
    assert compare(model, expected_path="logits") <= ORDER_OF_SUMS[torch.float32]
    with engine(model):
        assert "the check of its head" in loss_path(model)[1]
        assert model(**BATCH).logits.shape == (2, LENGTH, 128)


@pytest.mark.parametrize("family", [family for family in UNKNOWN if family != "opt"])
def test_models_without_a_layout_have_their_loss_tiled_too(family):
    """Among them heads with a bias (Phi) and with a scale (Cohere)."""
    assert compare(unknown(family)) <= ORDER_OF_SUMS[torch.float32]


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
    model = unknown(family, **changes)
    without = step(unknown(family, router_aux_loss_coef=0.5), BATCH)
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


READS = {
    "attribute": lambda out: out.logits,
    "key": lambda out: out["logits"],
    "getattr": lambda out: getattr(out, "logits", None),
}


@pytest.mark.parametrize("read", READS)
def test_reading_the_logits_names_the_way_out(read):
    model = adapted("llama", torch.float32)
    with engine(model):
        out = model(**BATCH)
        with pytest.raises(LogitsNotComputedError, match=r'got a read of outputs.logits.*Set tiled_loss="never"'):
            READS[read](out)
    with engine(model, tiled_loss="never"):
        assert READS[read](model(**BATCH)).shape == (2, LENGTH, 128)


def test_the_rest_of_the_output_is_the_model_s_own():
    model = adapted("llama", torch.float32)
    with engine(model):
        out = model(**BATCH, output_hidden_states=True)
        own = type(out).__mro__[1]
        assert own.__name__ == "CausalLMOutputWithPast" and isinstance(out, own)
        assert type(out).__name__ == own.__name__
        assert list(out.keys()) == ["loss", "hidden_states"] and "logits" not in out
        assert out[0] is out.loss and out["loss"] is out.loss and len(out.to_tuple()) == 2
        assert len(out.hidden_states) == 3 and out.attentions is None


@pytest.mark.parametrize("how", ["keyword", "position", "config"])
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_tuple_holds_the_logits(mode, how, caplog, monkeypatch):
    """A tuple has no attribute that could refuse to be read, so that ``return_dict=False`` is not tiled."""
    monkeypatch.setattr(block, "_said", set())
    model = unknown("bloom")  # among the models with return_dict in their signature
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
    model = unknown("bloom")
    base = model.get_base_model()
    base.config.return_dict = False
    with engine(model):
        assert base(**BATCH)[1].shape == (2, LENGTH, 128)
        with pytest.raises(LogitsNotComputedError):
            _ = base(**BATCH, return_dict=True).logits


def test_accelerate_s_conversion_of_outputs():
    """It runs over every output under mixed precision."""
    model = adapted("llama", torch.bfloat16, adapter_dtype=torch.float32)
    with engine(model):
        out = convert_to_fp32(model(**BATCH, output_hidden_states=True))
        assert out.loss.dtype == torch.float32 and out.hidden_states[0].dtype == torch.float32
        with pytest.raises(LogitsNotComputedError):
            _ = out.logits
        model.forward = convert_outputs_to_fp32(model.forward)
        model(**BATCH).loss.backward()
        del model.forward
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def test_outputs_are_walked_and_pickled_without_the_logits():
    """DDP and FSDP walk an output for tensors; multiprocessing pickles it."""
    model = adapted("llama", torch.float32)
    with engine(model):
        out = model(**BATCH)
        assert [leaf.shape for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)] == [torch.Size([])]
        assert "logits" not in {f.name for f in dataclasses.fields(out)}
        assert type(out.loss.detach()) is torch.Tensor
    assert "logits" in {f.name for f in dataclasses.fields(type(out).__mro__[1])}  # the model's own class keeps it
    assert pickle.loads(pickle.dumps(out.loss.detach())) == out.loss


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


def test_c41_the_signature_that_trainers_read_is_unchanged():
    model = adapted("llama", torch.float32)
    base = model.get_base_model()
    before = inspect.signature(base.forward), inspect.signature(type(base).forward), inspect.signature(model.forward)
    with engine(model):
        after = inspect.signature(base.forward), inspect.signature(type(base).forward), inspect.signature(model.forward)
        trainer = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
        )
        assert trainer.model_accepts_loss_kwargs
        trainer._set_signature_columns_if_needed()
        assert {"input_ids", "attention_mask", "labels"} <= set(trainer._signature_columns)
    assert after == before


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


def test_a_wrong_rule_for_the_head_is_found(monkeypatch):
    """A family whose logits are scaled under a name nobody reads: the check sees it, and whole logits are used."""
    model = adapted("granite", torch.float32)
    monkeypatch.setattr(causal_loss, "head_rule", lambda config: causal_loss.HeadRule())
    expected = step(model, BATCH)
    with engine(model):
        path, reason = loss_path(model)
        got = step(model, BATCH)
    assert path == "logits" and "the check of its head found logits off by" in reason
    assert max(errors(got, expected).values()) <= ORDER_OF_SUMS[torch.float32]


def test_the_check_of_the_head_leaves_no_trace():
    model = adapted("gemma2", torch.float32)
    base = model.get_base_model()
    calls = []
    base.model.register_forward_hook(lambda *args: calls.append(args))
    state, keys = torch.get_rng_state(), {n: sorted(m.__dict__) for n, m in base.named_modules() if n == "model"}
    with engine(model):
        assert loss_path(model) == ("tiled", "")
        assert torch.equal(torch.get_rng_state(), state) and not calls
        assert {n: sorted(m.__dict__) for n, m in base.named_modules() if n == "model"} == keys
    assert all(p.grad is None for p in model.parameters())
