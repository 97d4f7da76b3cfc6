"""What the tests of ``blocks`` share."""

from __future__ import annotations

import pytest


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention with a backward pass on the CPU: its dense reference implementation, uncompiled.

    torch 2.13 refuses gradients on the CPU before it looks at anything else, and compiles for a minute otherwise. The
    reference behind that check has a backward; ``test_flex_s_reference_is_right`` compares it with sdpa's gradients.
    """
    import torch.nn.attention.flex_attention as torch_flex
    import transformers.integrations.flex_attention as flex
    import transformers.masking_utils as masks

    def uncompiled(query, key, value, training=False, **kwargs):
        return torch_flex.flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(flex, "compile_friendly_flex_attention", uncompiled)
    block_mask = masks.create_block_mask

    def uncompiled_mask(*args, _compile=False, **kwargs):
        return block_mask(*args, **kwargs)

    monkeypatch.setattr(masks, "create_block_mask", uncompiled_mask)
