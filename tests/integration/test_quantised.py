"""Quantised bases as black boxes: LoRA's gradients over them, and merging only where and as PEFT merges.

bitsandbytes (4-bit and 8-bit, on the CPU), torchao and HQQ are used where they are installed; GPTQ and AWQ, whose
library needs a GPU, through PEFT's own layers for them around a base layer of integers.
"""

import copy
import importlib.util
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora.awq import AwqLoraLinear
from peft.tuners.lora.gptq import GPTQLoraLinear
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from helpers import fill_adapters, logits_of, loss_and_gradients, tiny_model, token_batch, worst_relative_error
from hf_memeff import MespConfig, SageConfig, attach, memeff_status
from integration._training import LORA, losses, sft

pytestmark = [
    pytest.mark.filterwarnings("ignore:(Merge|Unmerge) lora module to .-bit linear:UserWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]

OURS = {"mesp": MespConfig, "sage": partial(SageConfig, token_budget=1.0)}
ours = pytest.mark.parametrize("config_cls", OURS.values(), ids=OURS)
BLOCK_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def needs(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"needs {library}")


def nf4(compute_dtype, **settings):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype, **settings
    )


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(quant_type=Int8WeightOnlyConfig())


CONFIGS = {
    "nf4, fp32": lambda: nf4(torch.float32),
    "nf4 twice, bf16": lambda: nf4(torch.bfloat16, bnb_4bit_use_double_quant=True),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao": torchao_int8,
}
BITSANDBYTES = [pytest.param(kind, marks=needs("bitsandbytes")) for kind in CONFIGS if kind != "torchao"]
MERGING = [*BITSANDBYTES, pytest.param("torchao", marks=needs("torchao")), pytest.param("hqq", marks=needs("hqq"))]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A function that makes the same tiny model over a quantised base each time."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model(family="qwen2").save_pretrained(folder)  # with biases

    @cache
    def loaded(kind, dtype):
        if kind == "hqq":
            return in_hqq(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=CONFIGS[kind](), device_map={"": "cpu"}
        )

    return lambda kind, dtype=torch.float32: copy.deepcopy(loaded(kind, dtype))


def in_hqq(model):
    """Give the blocks of a model HQQ's linear layers of 4 bits."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    def pack(linear):
        return HQQLinear(linear, BaseQuantizeConfig(nbits=4, group_size=16), compute_dtype=torch.float32, device="cpu")

    return replace_linears(model.requires_grad_(False), pack)


def replace_linears(model, change):
    """Put what `change` makes of each linear layer of the blocks in its place."""
    for parent in [module for layer in model.model.layers for module in (layer.self_attn, layer.mlp)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, change(child))
    return model


def adapted(base, config_cls=LoraConfig, **settings):
    model = get_peft_model(base, config_cls(**{**LORA, "target_modules": BLOCK_LINEARS, **settings}))
    fill_adapters(model)
    return model


def assert_black_boxes(model, layer):
    status = memeff_status(model)
    assert [block.path for block in status.blocks] == ["structured"] * 2
    reasons = {linear.reason for linear in status.linears}
    assert len(reasons) == 1 and layer in (reason := reasons.pop()) and "its own forward" in reason


# gradients


@pytest.mark.parametrize("kind", MERGING)
@ours
def test_c21_gradients_are_lora_s_over_the_same_quantised_base(quantised, kind, config_cls):
    """Where the base computes in bfloat16, rounding separates the two: then as near to exact gradients as LoRA's."""
    model = adapted(quantised(kind), config_cls)
    names = {"int8": "Linear8bitLt", "torchao": "Int8Tensor", "hqq": "HQQLinear"}
    assert_black_boxes(model, names.get(kind, "Linear4bit"))
    stock_loss, expected = loss_and_gradients(adapted(quantised(kind)), token_batch())
    loss, found = loss_and_gradients(model, token_batch())
    assert loss == pytest.approx(stock_loss, abs=1e-5) and len(found) == 28
    if "bf16" not in kind:
        assert worst_relative_error(found, expected) <= 1e-5
        return
    exact_base = quantised(kind)
    for module in exact_base.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
    exact = loss_and_gradients(adapted(exact_base), token_batch())[1]
    assert worst_relative_error(found, exact) <= 1.1 * worst_relative_error(expected, exact) <= 0.2


@pytest.mark.parametrize("kind", BITSANDBYTES)
@pytest.mark.parametrize("way", [*OURS, "attach"])
def test_a_model_prepared_for_kbit_training_has_lora_s_gradients(quantised, kind, way):
    """A bfloat16 base, of which `prepare_model_for_kbit_training` makes float32 all but the quantised weights."""
    found = []
    for config_cls in (LoraConfig, OURS.get(way, LoraConfig)):
        base = prepare_model_for_kbit_training(quantised(kind, torch.bfloat16))
        assert base.model.norm.weight.dtype == torch.float32 and base.is_gradient_checkpointing
        found.append(adapted(base, config_cls, lora_dropout=0.1))
    if way == "attach":
        attach(found[1])
    assert_black_boxes(found[1], "Linear8bitLt" if kind == "int8" else "Linear4bit")
    (stock_loss, expected), (loss, gradients) = (loss_and_gradients(model, token_batch()) for model in found)
    assert loss == pytest.approx(stock_loss, abs=1e-5)
    assert worst_relative_error(gradients, expected) <= (1e-2 if "bf16" in kind else 1e-5)


@needs("bitsandbytes")
@pytest.mark.parametrize(("kind", "bf16"), [("nf4, fp32", False), ("nf4 twice, bf16", True)])
def test_qlora_style_sft_has_lora_s_losses(tmp_path, quantised, kind, bf16):
    """TRL keeps the adapters of a quantised base in bfloat16, in which nothing but rounding tells the runs apart."""
    runs = []
    for config_cls in (LoraConfig, *OURS.values()):
        torch.manual_seed(0)
        config = config_cls(**{**LORA, "target_modules": BLOCK_LINEARS})
        trainer = sft(tmp_path, quantised(kind), config, bf16=bf16, max_steps=3)
        fill_adapters(trainer.model)
        assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.bfloat16}
        trainer.train()
        runs.append(losses(trainer))
    assert len(runs[0]) == 3 and runs[0][2] != pytest.approx(runs[0][0], abs=1e-2)
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], abs=2e-3)


# merging


def state_of(model):
    """Everything the model holds, quantised weights and their scales included, as plain tensors."""
    state = {n: v.dequantize() if type(v) not in (torch.Tensor, nn.Parameter) else v for n, v in tensors_of(model)}
    return {name: value.clone() for name, value in state.items()}


def tensors_of(model):
    for name, value in model.state_dict().items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        yield from ((f"{name}{part}", tensor) for part, tensor in parts if isinstance(tensor, torch.Tensor))


def assert_same_state(model, expected):
    found = state_of(model)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", MERGING)
@ours
def test_c21_unmerging_brings_the_quantised_base_back_bit_for_bit(quantised, kind, config_cls):
    model, stock = adapted(quantised(kind), config_cls), adapted(quantised(kind))
    loss_and_gradients(model, token_batch())
    before, logits = state_of(model), logits_of(model)
    stock.merge_adapter()
    for _ in range(2):
        model.merge_adapter()
        assert torch.equal(logits_of(model), logits_of(stock)) and not torch.equal(logits_of(model), logits)
        model.unmerge_adapter()
        assert_same_state(model, before)
        assert torch.equal(logits_of(model), logits)
    stock.unmerge_adapter()
    assert not torch.equal(logits_of(stock), logits)  # why the weights are kept
    trained = loss_and_gradients(model, token_batch())[1]
    assert (
        worst_relative_error(trained, loss_and_gradients(adapted(quantised(kind), config_cls), token_batch())[1]) == 0
    )


@needs("bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4, fp32", "int8"])
def test_disabling_a_merged_adapter_gives_the_base_model_bit_for_bit(quantised, kind):
    model = adapted(quantised(kind), MespConfig)
    base, logits = logits_of(quantised(kind)), logits_of(model)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits_of(model), base)
    assert torch.equal(logits_of(model), logits)


@needs("bitsandbytes")
def test_two_adapters_merged_one_after_the_other_are_both_undone(quantised):
    model = adapted(quantised("nf4, fp32"), MespConfig)
    model.add_adapter("second", MespConfig(**{**LORA, "target_modules": BLOCK_LINEARS}))
    fill_adapters(model)
    before = state_of(model)
    model.merge_adapter(["default"])
    once = logits_of(model)
    model.merge_adapter(["second"])
    assert not torch.equal(logits_of(model), once)
    model.unmerge_adapter()
    assert_same_state(model, before)


@needs("bitsandbytes")
def test_a_refused_merge_leaves_the_base_as_it_was(quantised):
    model = adapted(quantised("nf4, fp32"), MespConfig)
    with torch.no_grad():
        model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.lora_B.default").weight[0, 0] = torch.nan
    before = state_of(model)
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    found = state_of(model)
    assert all(torch.equal(found[name].nan_to_num(), value.nan_to_num()) for name, value in before.items())


@pytest.mark.parametrize("kind", MERGING)
@ours
def test_merge_and_unload_is_lora_s(quantised, kind, config_cls):
    merged, stock = (adapted(quantised(kind), used).merge_and_unload() for used in (config_cls, LoraConfig))
    assert torch.equal(logits_of(merged), logits_of(stock))
    assert {type(module) for module in merged.modules()} == {type(module) for module in stock.modules()}


@needs("bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4, fp32", "int8"])
@ours
def test_c21_a_lora_bias_that_peft_would_merge_unscaled_is_refused(quantised, kind, config_cls):
    """PEFT's merge loses alpha / r, which is 2 here, on these layers; where it is 1, there is nothing to lose."""
    settings = {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}
    model = adapted(quantised(kind), config_cls, **settings)
    before = logits_of(model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"lora_bias and a scaling of 2, expected a scaling of 1.*Fix: load the"):
            merge()
        assert torch.equal(logits_of(model), before)
    model = adapted(quantised(kind), config_cls, **{**settings, "lora_alpha": LORA["r"]})
    state = state_of(model)
    model.merge_adapter()
    model.unmerge_adapter()
    assert_same_state(model, state)


# layers that PEFT knows and does not merge


class PackedLinear(nn.Module):
    """Integers in `qweight` (Din, Dout) and a scale per output, as GPTQ's and AWQ's layers hold them."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.register_buffer("scales", weight.abs().amax(1) / 7)
        self.register_buffer("qweight", (weight.t() / self.scales).round().to(torch.int8))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x):
        return F.linear(x, (self.qweight.to(x.dtype) * self.scales.to(x.dtype)).t(), self.bias)


def packed(config_cls, layer, method, **settings):
    """A model whose linear layers are packed, adapted with PEFT's layer for the quantiser."""
    base = replace_linears(tiny_model(family="qwen2").requires_grad_(False), PackedLinear)
    base.quantization_method = method
    config = config_cls(**{**LORA, "target_modules": BLOCK_LINEARS, **settings})
    config._register_custom_module({PackedLinear: layer})
    model = get_peft_model(base, config)
    fill_adapters(model)
    assert sum(type(module) is layer for module in model.modules()) == 14
    return model


PACKED = {"gptq": GPTQLoraLinear, "awq": AwqLoraLinear}


@pytest.mark.parametrize("method", PACKED)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@ours
def test_c22_gptq_and_awq_layers_train_as_lora_s(method, dropout, config_cls):
    model, stock = (packed(used, PACKED[method], method, lora_dropout=dropout) for used in (config_cls, LoraConfig))
    assert_black_boxes(model, "PackedLinear")
    (stock_loss, expected), (loss, found) = (loss_and_gradients(m, token_batch()) for m in (stock, model))
    assert loss == pytest.approx(stock_loss, abs=1e-6) and len(found) == 28
    assert worst_relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("method", PACKED)
@ours
def test_c22_merging_gptq_and_awq_is_refused_as_peft_refuses_it(method, config_cls):
    model, stock = (packed(used, PACKED[method], method) for used in (config_cls, LoraConfig))
    before, gradients = logits_of(model), loss_and_gradients(model, token_batch())[1]
    for merge in ("merge_adapter", "merge_and_unload"):
        said = []
        for refused in (stock, model):
            with pytest.raises((ValueError, NotImplementedError)) as caught:
                getattr(refused, merge)()
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1]
        assert torch.equal(logits_of(model), before) and memeff_status(model).attached
    assert worst_relative_error(loss_and_gradients(model, token_batch())[1], gradients) == 0
