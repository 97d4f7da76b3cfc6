"""A training loop of one's own with Accelerate, without Trainer; `LoraConfig` has become `MespConfig` or `SageConfig`.

    pip install -e ".[demo]"
    python examples/accelerate_loop.py                             SmolLM2-135M-Instruct, as `hf-memeff demo` finds it
    python examples/accelerate_loop.py --method sage --steps 100
    accelerate launch examples/accelerate_loop.py --model Qwen/Qwen2.5-0.5B-Instruct

The data is the small instruction set of the demo.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import get_peft_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, get_linear_schedule_with_warmup

from hf_memeff import MespConfig, SageConfig, memeff_status
from hf_memeff.recipes.instruction_data import load_rows
from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer

parser = argparse.ArgumentParser(description="Fine-tune in a bare Accelerate loop with MeSP or SAGE.")
parser.add_argument("--model", help="a folder, a .gguf file, or a Hub id (default: SmolLM2-135M-Instruct)")
parser.add_argument("--method", choices=("mesp", "sage"), default="mesp")
parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
parser.add_argument("--output", default="accelerate_loop")
arguments = parser.parse_args()

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
source = find_smollm2(arguments.model)
tokenizer = load_tokenizer(source)
config_class = {"mesp": MespConfig, "sage": SageConfig}[arguments.method]
model = get_peft_model(load_model(source), config_class(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [tokenizer(f"{row.note}\n{row.ticket}{tokenizer.eos_token}") for row in load_rows("train")]
loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
# Accelerate steps a prepared scheduler once per process, so that it ends with the run however many there are
schedule = get_linear_schedule_with_warmup(optimizer, 0, arguments.steps * accelerator.num_processes)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
accelerator.print(memeff_status(model))

model.train()
losses: list[float] = []
while len(losses) < arguments.steps:
    micro_losses = []
    for batch in loader:
        with accelerator.accumulate(model):  # optimizer and schedule step after the last micro-batch alone
            loss = model(**batch).loss
            accelerator.backward(loss)
            micro_losses.append(accelerator.gather(loss.detach()).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(torch.stack(micro_losses).mean().item())
            micro_losses = []
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
        if len(losses) == arguments.steps:
            break

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(arguments.output)
