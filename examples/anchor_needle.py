r"""Needles in a long text, and questions about long documents: dense attention against AnchorAttention.

    pip install -e ".[trl,demo]"

Small version, offline, minutes on two cores: SmolLM2-135M-Instruct, two facts in 2048 and 3072 tokens of Python's own
documentation, and two questions about 2048 tokens of the order notes that the package carries.

    python examples/anchor_needle.py

Full version, on a GPU with the Hub: up to 131,072 tokens, ten depths, SQuAD's passages as documents. The text has to be
as long as the longest prompt and the calibration together: a folder of books as *.txt.

    python examples/anchor_needle.py --model Qwen/Qwen2.5-7B-Instruct-1M --dtype bfloat16 --text BOOKS --step 16 \
        --lengths 8192 16384 32768 65536 131072 --depths 0.05 0.15 0.25 0.35 0.45 0.55 0.65 0.75 0.85 0.95 \
        --calibration_tokens 32768 --dataset_name rajpurkar/squad --question_lengths 8192 32768 131072 \
        --questions 50 --answer_tokens 16 --output_dir anchor_needle_7b

A cell is whether the answer, written greedily, holds the right one, and the loss of the right one's tokens. The third
way, first keys and window alone, says whether anything beyond these was needed. All facts are in the same text, asked
for one by one; thresholds are calibrated on the end of the text, which is never measured.

The results are needles.json and questions.json in output_dir; the same command again goes on where it was interrupted.
Keys of the YAML file and options are the fields of NeedleArguments in hf_memeff.recipes, named as those of TRL's own
scripts where these have them, and settings of AnchorAttentionConfig; --help lists them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memeff.recipes.needle_grid import grid_table, run_needles
from hf_memeff.recipes.scripts import one_line_errors

CONFIG = Path(__file__).with_suffix(".yaml")


def main(words: Sequence[str]) -> None:
    """Ask, and print a table of needles and one of questions."""
    found = run_needles(CONFIG, words)
    print("\n" + grid_table(found.needles, [f"at {depth:g}" for depth in found.needles[0].depths]))
    print("\n" + grid_table(found.questions, [f"question {n + 1}" for n in range(len(found.questions[0].questions))]))
    print(f"\nWrote {' and '.join(map(str, found.paths))}")


if __name__ == "__main__":
    with one_line_errors("anchor_needle"):
        main(sys.argv[1:])
