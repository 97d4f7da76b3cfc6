"""`transformers.Trainer` on a model that carries a plain LoRA adapter; `MespCallback` is the one addition.

    pip install -e ".[demo]"
    python examples/mesp_trainer.py                                SmolLM2-135M-Instruct, as `hf-memeff demo` finds it
    python examples/mesp_trainer.py --store disk --steps 100

The data is the small instruction set of the demo.
"""

import argparse

from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from hf_memeff import MespCallback
from hf_memeff.recipes.instruction_data import load_rows
from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer

parser = argparse.ArgumentParser(description="Fine-tune a LoRA model with Trainer and MeSP.")
parser.add_argument("--model", help="a folder, a .gguf file, or a Hub id (default: SmolLM2-135M-Instruct)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--store", choices=("memory", "cpu", "disk"), default="memory")
parser.add_argument("--output", default="mesp_trainer")
arguments = parser.parse_args()

source = find_smollm2(arguments.model)
tokenizer = load_tokenizer(source)
model = get_peft_model(load_model(source), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [tokenizer(f"{row.note}\n{row.ticket}{tokenizer.eos_token}") for row in load_rows("train")]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        arguments.output, max_steps=arguments.steps, per_device_train_batch_size=4, logging_steps=1, report_to="none"
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[MespCallback(activation_store=arguments.store)],
)
trainer.train()
model.save_pretrained(arguments.output)
