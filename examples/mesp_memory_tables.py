r"""The paper's three memory tables for MeSP: by model, by length, by rank; in its setting and in float32.

    pip install -e ".[trl,quant]"

Small version, offline, minutes on two cores: the Qwen2.5 shapes with few of their blocks, random weights, and without
the arithmetic of matrix products, which changes no allocation.

    python examples/mesp_memory_tables.py

All blocks, all lengths and ranks, still on a CPU:

    python examples/mesp_memory_tables.py --layers 0 --lengths 128 256 512 1024 --ranks 4 8 16 32 --cosine_layers 24

Full version, on a GPU, computed and timed:

    python examples/mesp_memory_tables.py --layers 0 --lengths 128 256 512 1024 --ranks 4 8 16 32 --products computed \
        --rounds 5 --cosine_layers 24 --cosine_tokens 256

MeBP is PyTorch's checkpoint around each block; it has the same tiled loss and the same attention kernel as MeSP, so
that the difference between the two is the block's. The columns with the stock loss show what the loss alone takes. MeZO
re-uses its seed and stores no perturbation. The cosine of its gradient estimate to the exact one is below the tables.

The tables are memory_tables.md in output_dir, the figures memory_tables.json and mezo_cosine.json. Keys of the YAML
file and options are the fields of TableSettings in hf_memeff.recipes.memory_tables; --help lists them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memeff.recipes.config_keys import parse_keys
from hf_memeff.recipes.memory_tables.run import MemoryTables
from hf_memeff.recipes.memory_tables.settings import TableSettings
from hf_memeff.recipes.scripts import one_line_errors

CONFIG = Path(__file__).with_suffix(".yaml")


def main(words: Sequence[str]) -> None:
    """Measure and print the tables."""
    (settings,) = parse_keys(CONFIG, words, TableSettings)
    MemoryTables(settings).run()


if __name__ == "__main__":
    with one_line_errors("mesp_memory_tables"):
        main(sys.argv[1:])
