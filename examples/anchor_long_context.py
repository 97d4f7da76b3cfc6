"""Ask a question about a long document, first with dense attention, then with AnchorAttention.

    pip install -e ".[demo]"
    python examples/anchor_long_context.py                   a fact hidden in 6000 tokens of Python's own documentation
    python examples/anchor_long_context.py --document book.txt --question "Who wrote it?" --tokens 16000 --model MODEL

Prints each way's answer and the seconds until its first token, and which share of the candidate keys AnchorAttention
attended. Its thresholds come from other text, here anew in each run: keep yours with config.save(path).
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers.generation.streamers import BaseStreamer

from hf_memeff import anchor_report, calibrate_anchor, set_anchor_config
from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer

FACT = " The secret code of the lighthouse is 48213. "

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder, a .gguf file, or a Hub id (default: SmolLM2-135M-Instruct)")
parser.add_argument("--document", type=Path, help="a text file (default: Python's documentation, with a fact in it)")
parser.add_argument("--question", default="What is the secret code of the lighthouse?", help="(default: %(default)s)")
parser.add_argument("--tokens", type=int, default=6000, help="of the document, at least 4500 (default: %(default)s)")
parser.add_argument("--calibration-tokens", type=int, default=4096, help="(default: %(default)s)")
parser.add_argument("--answer-tokens", type=int, default=24, help="(default: %(default)s)")
arguments = parser.parse_args()
if arguments.tokens < 4500:
    parser.error(f"got --tokens {arguments.tokens}, expected 4500 or more: shorter prompts are attended to densely")


class Clock(BaseStreamer):
    """Notes when the prompt and each token after it were there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


source = find_smollm2(arguments.model)
tokenizer, model = load_tokenizer(source), load_model(source)


def encode(text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


python = encode("\n".join(topics.values()))
other, document = python[-arguments.calibration_tokens :], python[: arguments.tokens]
if arguments.document is not None:
    document = encode(arguments.document.read_text(encoding="utf-8"))[: arguments.tokens]
else:
    document[len(document) // 3 : len(document) // 3] = encode(FACT)
text = f"{tokenizer.decode(document)}\n\n{arguments.question}"
if tokenizer.chat_template is not None:
    chat = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
prompt = torch.tensor([encode(text)])

# without a mask, generate would take end tokens inside of the prompt for padding
settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": arguments.answer_tokens, "do_sample": False}

print(f"Calibrating on {len(other)} tokens of other text ...")
set_anchor_config(model, calibrate_anchor(model, torch.tensor([other])))
for name in ("sdpa", "anchor"):
    model.set_attn_implementation(name)
    clock = Clock()
    tokens = model.generate(prompt, streamer=clock, **settings)
    answer = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True).strip()
    print(f"{name}: {clock.times[1] - clock.times[0]:.1f} s for {prompt.shape[1]} tokens, answer {answer!r}")
print(str(anchor_report(model)).splitlines()[0])
