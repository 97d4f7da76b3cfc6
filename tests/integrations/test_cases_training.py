"""Published cases of training runs with both methods: C15 to C18, C36, C38, C41 and C42."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, TrainerCallback

from helpers import (
    VOCAB,
    adapted_model,
    fill_adapters,
    loss_and_gradients,
    tiny_model,
    token_batch,
    worst_relative_error,
)
from hf_memeff import AdapterHealthCallback, MespConfig, SageConfig, measure_peak_memory, saved_tensor_bytes
from hf_memeff.integrations.attention import register_anchor
from hf_memeff.recipes.demo.stock_peft import TokenRow, answer_loss
from integration._training import LORA, losses, rows_with_uneven_labels, trainer

EXACT = {"mesp": MespConfig, "sage": partial(SageConfig, token_budget=1.0)}
SPARSE = partial(SageConfig, token_budget=0.3, sink_tokens=1, dense_layers=())
ALL = {**EXACT, "sparse sage": SPARSE}

exact = pytest.mark.parametrize("config", EXACT.values(), ids=EXACT)
every_method = pytest.mark.parametrize("config", ALL.values(), ids=ALL)


# C15: float32 adapters on a bfloat16 base


@every_method
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_c15_nothing_in_float32_of_the_size_of_the_input_is_saved_and_less_than_lora_saves(config, dropout):
    targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    batch = token_batch(rows=4, length=32)
    tokens, saved = 4 * 32, []
    for each in (LoraConfig, config):
        model = adapted_model(each, dtype=torch.bfloat16, target_modules=targets, lora_dropout=dropout).train()
        assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
        core, packed = model.get_base_model().model, []
        embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, packed=packed: packed.append(t) or t, lambda t: t)
        with torch.autocast("cpu", torch.bfloat16):
            # the last norm, outside the blocks, is transformers' own and saves float32
            norm, core.norm = core.norm, torch.nn.Identity()
            forward = partial(core, inputs_embeds=embedded, use_cache=False)
            with hooks:
                forward()
            saved.append(saved_tensor_bytes(forward, exclude=model))
            core.norm = norm
        wide = [t for t in packed if t.dtype == torch.float32 and t.numel() >= tokens * 64]
        assert bool(wide) == (each is LoraConfig)
    assert saved[1] < 0.3 * saved[0]


# C16: mixed dtypes


@exact
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("wide_adapter", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c16_steps_in_every_mix_of_dtypes_are_lora_s(config, dtype, wide_adapter, autocast):
    found = []
    for each in (LoraConfig, config):
        model = get_peft_model(tiny_model(dtype=dtype), each(**LORA), autocast_adapter_dtype=wide_adapter)
        fill_adapters(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(loss_and_gradients(model, token_batch()))
        model.train()(**token_batch()).loss.backward()
        assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.requires_grad)
    (loss, expected), (ours, gradients) = found
    half = autocast or dtype != torch.float32
    assert ours == pytest.approx(loss, abs=5e-2 if half else 1e-5)
    together = [torch.cat([found[n].flatten() for n in expected]) for found in (gradients, expected)]
    assert (together[0] - together[1]).norm() <= (0.05 if half else 1e-5) * together[1].norm()


@every_method
def test_c16_generating_from_a_callback_outside_of_autocast(tmp_path, config):
    """The adapter is float32, the base bfloat16, and the model is in the middle of a training run."""

    class Generate(TrainerCallback):
        answers: list[torch.Tensor] = []  # noqa: RUF012

        def on_step_end(self, args, state, control, model, **kwargs):
            ids = token_batch()["input_ids"]
            self.answers.append(model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0))
            model.train()

    runs = []
    for each in (LoraConfig, config) if config is not SPARSE else (config, config):
        Generate.answers = []
        model = adapted_model(each, dtype=torch.bfloat16)
        built = trainer(tmp_path, model, callbacks=[Generate()], bf16=True, max_steps=2, learning_rate=1e-4)
        built.train()
        assert len(Generate.answers) == 2 and all(answer.shape == (2, 22) for answer in Generate.answers)
        runs.append((losses(built), Generate.answers))
    assert runs[1][0] == pytest.approx(runs[0][0], abs=1e-3)


# C17: half precision and heads that are trained whole


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c17_a_classification_head_on_a_half_precision_base(tmp_path, caplog, config, dtype):
    """PEFT leaves the copy of a saved module in the base model's dtype; the health callback names it and what to do."""
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_config(tiny_model(num_labels=3).config, dtype=dtype)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "SEQ_CLS"}
    model = get_peft_model(base, config(**settings))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    (head,) = (name for name in trained if "score" in name)
    assert {p.dtype for name, p in trained.items() if name != head} == {torch.float32} and trained[head].dtype == dtype
    batch = token_batch(rows=8)
    data = [{"input_ids": batch["input_ids"][row], "labels": torch.tensor(row % 3)} for row in range(8)]
    arguments = {"data": data, "bf16": True, "learning_rate": 1e-3}
    with caplog.at_level("WARNING", "hf_memeff"):
        trainer(tmp_path, model, callbacks=[AdapterHealthCallback()], max_steps=1, **arguments).train()
    (message,) = (m for m in caplog.messages if "AdapterHealthCallback" in m)
    assert f"got 1 trained tensors in {str(dtype)[6:]}, such as score (default)," in message
    assert "call .float() on the copies of modules_to_save" in message

    model.base_model.model.score.modules_to_save["default"].float()
    health = AdapterHealthCallback(every=1, on_fault="stop")
    built = trainer(tmp_path, model, callbacks=[health], max_steps=5, **arguments)
    built.train()
    assert len(losses(built)) == 5 and all(torch.tensor(losses(built)).isfinite())
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(report.changed_share > 0.2 for report in health.reports)


# C38: evaluation


def test_c38_the_recipe_s_evaluation_holds_no_logits_of_earlier_rows():
    model = adapted_model(MespConfig).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (64, 64), generator=generator).tolist()
    rows = [TokenRow(row[:40], row[40:]) for row in ids]
    few, many = (measure_peak_memory(partial(answer_loss, model, rows[:count], 0), "cpu") for count in (8, 64))
    result = 64 * VOCAB * 4  # the logits of one position per row
    assert 0 < many.peak_bytes <= few.peak_bytes + 2 * result


@every_method
def test_c38_a_trainer_s_loss_only_evaluation_needs_no_more_for_more_rows(tmp_path, config):
    """With `tiled_loss="always"` evaluation builds no logits either, and its loss is the same."""
    peaks, values = {}, []
    for tiled in ("auto", "always"):
        model = adapted_model(config, tiled_loss=tiled)
        arguments = {"per_device_eval_batch_size": 8, "prediction_loss_only": True}
        built = trainer(tmp_path, model, data=rows_with_uneven_labels(8), **arguments)
        rows = [row for _ in range(8) for row in built.train_dataset]
        for count in (16, 64):
            seen = measure_peak_memory(partial(built.evaluate, rows[:count]), "cpu")
            peaks[tiled, count] = seen.peak_bytes
            values.append(seen.result["eval_loss"])
        assert peaks[tiled, 64] <= 1.05 * peaks[tiled, 16]
    assert values == pytest.approx([values[0]] * 4, abs=1e-5)


# C41: accumulation


class FirstGradients(TrainerCallback):
    """Keep the gradients that the first optimizer step sees."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not hasattr(self, "found"):
            self.found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "anchor"])
def test_c41_eight_rows_at_once_and_two_by_four_give_equal_gradients(tmp_path, attention):
    """With rows of 2 to 16 labels; AnchorAttention trains densely."""
    register_anchor()
    found = {}
    for name, config in {"lora": LoraConfig, **EXACT}.items():
        for rows, steps in ((8, 1), (2, 4)):
            gradients = FirstGradients()
            model = adapted_model(config)
            model.get_base_model().set_attn_implementation(attention)
            settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
            trainer(tmp_path, model, callbacks=[gradients], max_grad_norm=0.0, max_steps=1, **settings).train()
            found[name, rows] = gradients.found
    expected = found["lora", 8]
    for which, gradients in found.items():
        assert worst_relative_error(gradients, expected) <= 1e-4, which
        assert max((gradients[n] - expected[n]).abs().max() for n in expected) <= 1e-5, which


# C42: resuming (killed runs are in integration/test_crash.py)


@every_method
def test_c42_a_second_wrapping_is_named_and_a_loaded_adapter_trains_only_if_asked(tmp_path, config):
    model = adapted_model(config)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="modify a model with PEFT for a second time"):
        get_peft_model(model, config(**LORA))
    own = type(config(**LORA)).from_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(tiny_model(), tmp_path, config=own)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer(tmp_path / "run", frozen).train()
