"""A stock TRL script with one change: `LoraConfig` is `MespConfig`.

    pip install -e ".[trl,demo]"
    python examples/mesp_sft.py                                    SmolLM2-135M-Instruct, as `hf-memeff demo` finds it
    python examples/mesp_sft.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 100

The data is the small instruction set of the demo.
"""

import argparse

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from hf_memeff import MespConfig, memeff_status
from hf_memeff.recipes.instruction_data import SYSTEM_PROMPT, load_rows
from hf_memeff.recipes.model_source import find_smollm2, load_model, load_tokenizer

parser = argparse.ArgumentParser(description="Fine-tune with TRL and MeSP.")
parser.add_argument("--model", help="a folder, a .gguf file, or a Hub id (default: SmolLM2-135M-Instruct)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", default="mesp_sft")
arguments = parser.parse_args()

source = find_smollm2(arguments.model)
rows = [
    {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row.note}],
        "completion": [{"role": "assistant", "content": row.ticket}],
    }
    for row in load_rows("train")
]
trainer = SFTTrainer(
    model=load_model(source),
    processing_class=load_tokenizer(source),
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        arguments.output,
        max_steps=arguments.steps,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    ),
    peft_config=MespConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
print(memeff_status(trainer.model))
trainer.train()
trainer.save_model()
