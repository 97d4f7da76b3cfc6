"""accelerate's offloading and device hooks around the blocks."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from helpers import fill_adapters, loss_and_gradients, tiny_model, token_batch, worst_relative_error
from hf_memeff import MespConfig, attach, detach, memeff_status
from integration._training import LORA

CPU = torch.device("cpu")


def offload(module, kind, folder):
    """Offload a module with all its children; its weights are on the meta device between calls."""
    if kind == "cpu":
        cpu_offload(module, execution_device=CPU)
    else:
        disk_offload(module, str(folder), execution_device=CPU)


def wrapped_then_offloaded(config_cls, kind, folder):
    """Frozen weights alone: accelerate would put the gradients of offloaded adapters into parameters it throws away."""
    model = get_peft_model(tiny_model(), config_cls(**LORA))
    fill_adapters(model)
    for name, module in list(model.named_modules()):
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            offload(module, kind, folder / name)
    return model


def offloaded_then_wrapped(config_cls, kind, folder):
    base = tiny_model()
    offload(base, kind, folder)
    model = get_peft_model(base, config_cls(**LORA))
    for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
        for factors in (layer.lora_A, layer.lora_B):
            factors.to_empty(device=CPU)  # PEFT puts new adapters beside their base layer, here on the meta device
    fill_adapters(model)
    return model


@pytest.mark.parametrize("way", ["config", "attach"])
@pytest.mark.parametrize("build", [wrapped_then_offloaded, offloaded_then_wrapped])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_blocks_are_recomputed_whole_and_say_so(tmp_path, kind, build, way):
    expected = loss_and_gradients(build(LoraConfig, kind, tmp_path / "stock"), token_batch())
    model = build(MespConfig if way == "config" else LoraConfig, kind, tmp_path / "ours")
    if way == "attach":
        attach(model)
    status = memeff_status(model)
    assert [block.path for block in status.blocks] == ["recompute"] * 2
    assert all("managed by accelerate's hooks" in block.reason for block in status.blocks)
    for _ in range(2):  # the second step meets the weights as the first one left them
        loss, gradients = loss_and_gradients(model, token_batch())
        assert abs(loss - expected[0]) <= 1e-6 and worst_relative_error(gradients, expected[1]) <= 1e-5
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen and all(p.is_meta for p in frozen)


def put_device_hooks(model):
    """What `device_map` leaves on a model that is spread over devices: each block moves its inputs to its own."""
    for layer in model.get_submodule("model.layers"):
        add_hook_to_module(layer, AlignDevicesHook(execution_device=CPU, io_same_device=True))


@pytest.mark.parametrize("order", ["hooks first", "hooks last"])
@pytest.mark.parametrize("way", ["config", "attach"])
def test_blocks_behind_device_hooks_run_structured(order, way):
    def build(config_cls):
        base = tiny_model()
        if order == "hooks first":
            put_device_hooks(base)
        model = get_peft_model(base, config_cls(**LORA))
        fill_adapters(model)
        if order == "hooks last" and config_cls is MespConfig:
            put_device_hooks(base)
        return model

    expected = loss_and_gradients(build(LoraConfig), token_batch())
    model = build(MespConfig if way == "config" else LoraConfig)
    if way == "attach":
        attach(model)
        if order == "hooks last":
            put_device_hooks(model.get_base_model())
    assert [(block.path, block.reason) for block in memeff_status(model).blocks] == [("structured", "")] * 2
    for layer in model.get_base_model().model.layers:
        assert isinstance(layer._hf_hook, AlignDevicesHook)
    moved = []
    pre_forward = AlignDevicesHook.pre_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignDevicesHook, "pre_forward", lambda *a, **k: moved.append(a) or pre_forward(*a, **k))
        loss, gradients = loss_and_gradients(model, token_batch())
    assert len(moved) == 2  # the hooks still stand in front of the blocks, and backward does not run them again
    assert abs(loss - expected[0]) <= 1e-6 and worst_relative_error(gradients, expected[1]) <= 1e-5
    detach(model)
    assert [block.path for block in memeff_status(model).blocks] == []
    again = loss_and_gradients(model, token_batch())
    assert again[0] == expected[0] and worst_relative_error(again[1], expected[1]) == 0
