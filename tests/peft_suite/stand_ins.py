"""Random-weight stand-ins for the Hub models that PEFT's tests load, in a folder laid out as the Hub's cache.

With `HF_HUB_CACHE` on that folder and `HF_HUB_OFFLINE=1` every loader finds them under the Hub's names, without a
patch of any library. Architectures are those that the names say; sizes are of the same order, weights are random.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

COMMIT = "0" * 40

_BERT = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
}
_ROBERTA = _BERT | {"max_position_embeddings": 514, "type_vocab_size": 1}
_DEBERTA = _BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
_LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_GPT2 = {"vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_OPT = {
    "vocab_size": 1024,
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 100,
}
_BART = {
    "vocab_size": 1024,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 4,
    "decoder_ffn_dim": 4,
    "max_position_embeddings": 100,
}
_T5 = {"vocab_size": 1024, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
_GEMMA3 = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MOE = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", "opt", _OPT),
    "peft-internal-testing/tiny-random-OPTForCausalLM-extended-vocab": (
        "OPTForCausalLM",
        "opt",
        _OPT | {"vocab_size": 1026},
    ),
    "peft-internal-testing/opt-125m": (
        "OPTForCausalLM",
        "opt",
        _OPT | {"hidden_size": 48, "word_embed_proj_dim": 48, "ffn_dim": 96, "num_hidden_layers": 12},
    ),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", "gpt2", _GPT2),
    "peft-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", "gpt2", _GPT2),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", "gpt2", _GPT2),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", "gptj", _GPT2 | {"rotary_dim": 4}),
    "peft-internal-testing/tiny-random-BloomForCausalLM": (
        "BloomForCausalLM",
        "bloom",
        {"vocab_size": 1024, "hidden_size": 32, "n_layer": 5, "n_head": 4},
    ),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", "gpt_neox", _BERT),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", "llama", _LLAMA),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", "llama", _LLAMA),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", "llama", _LLAMA),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        "llama",
        _LLAMA | {"pad_token_id": 0},
    ),
    "peft-internal-testing/tiny-dummy-qwen2": (
        "Qwen2ForCausalLM",
        "qwen2",
        _LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": (
        "Qwen3ForCausalLM",
        "qwen3",
        _LLAMA | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "hf-internal-testing/tiny-random-MistralForCausalLM": (
        "MistralForCausalLM",
        "mistral",
        _LLAMA | {"num_key_value_heads": 2},
    ),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", "gemma3_text", _GEMMA3),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _MOE | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "hf-internal-testing/Mixtral-tiny": (
        "MixtralForCausalLM",
        "mixtral",
        _MOE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        "gpt_oss",
        _MOE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "trl-internal-testing/tiny-Llama4ForCausalLM": (
        "Llama4ForCausalLM",
        "llama4_text",
        _MOE
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 1,
        },
    ),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", "bert", _BERT),
    "hf-internal-testing/tiny-random-BertModel": ("BertModel", "bert", _BERT),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": ("BertForSequenceClassification", "bert", _BERT),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", "roberta", _ROBERTA),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        "roberta",
        _ROBERTA,
    ),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", "deberta", _DEBERTA),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", "deberta-v2", _DEBERTA),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", "bart", _BART),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", "t5", _T5),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": (
        "T5ForConditionalGeneration",
        "t5",
        _T5,
    ),
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", "t5", _T5),
    "google/flan-t5-small": ("T5ForConditionalGeneration", "t5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "peft-internal-testing/tiny-clip-text-2": (
        "CLIPTextModel",
        "clip_text_model",
        {
            "vocab_size": 1024,
            "hidden_size": 32,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "peft-internal-testing/tiny-random-ResNetForImageClassification": (
        "ResNetForImageClassification",
        "resnet",
        {"embedding_size": 10, "hidden_sizes": [10, 20, 30, 40], "depths": [1, 1, 2, 1], "num_labels": 3},
    ),
}
"""Name on the Hub: class, model type and config."""

ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-OPTForCausalLM-lora": (
        "AutoModelForCausalLM",
        "peft-internal-testing/tiny-random-OPTForCausalLM",
        {"task_type": "CAUSAL_LM", "r": 8},
    ),
    "peft-internal-testing/gpt2-lora-random": (
        "AutoModelForCausalLM",
        "peft-internal-testing/tiny-random-gpt2",
        {"task_type": "CAUSAL_LM", "r": 8},
    ),
}
"""Name on the Hub: auto class, base model and fields of LoraConfig. Loading one is LoRA in every run."""


def lay_out(hub: Path, names: list[str] | None = None) -> None:
    """Write the stand-ins that are not there yet.

    Args:
        hub: folder for `HF_HUB_CACHE`.
        names: names on the Hub; None for all.
    """
    for name, (class_name, model_type, config) in MODELS.items():
        if names is None or name in names:
            _put(hub, name, lambda folder: _save_model(folder, class_name, model_type, config))  # noqa: B023
    for name, (auto, base, fields) in ADAPTERS.items():
        if names is None or name in names:
            _put(hub, name, lambda folder: _save_adapter(folder, hub, auto, base, fields))  # noqa: B023


def snapshot(hub: Path, name: str) -> Path:
    """The folder that holds a repository's files."""
    return hub / ("models--" + name.replace("/", "--")) / "snapshots" / COMMIT


def _put(hub: Path, name: str, save: Callable[[Path], None]) -> None:
    """Make one repository of the cache; it is there as a whole or not at all."""
    folder = snapshot(hub, name)
    reference = folder.parents[1] / "refs" / "main"
    if reference.is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    save(folder)
    reference.parent.mkdir(exist_ok=True)
    reference.write_text(COMMIT, encoding="utf-8")


def _save_model(folder: Path, class_name: str, model_type: str, config: dict[str, Any]) -> None:
    cls = getattr(transformers, class_name)
    cls(transformers.AutoConfig.for_model(model_type, **config)).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _save_adapter(folder: Path, hub: Path, auto: str, base: str, fields: dict[str, Any]) -> None:
    model = getattr(transformers, auto).from_pretrained(snapshot(hub, base))
    model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **fields))
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Tokens are bytes; ids stay below 300, the least that any of the models knows."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=100,
    )
