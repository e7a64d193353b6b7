"""A stage script as a user runs it, but with less held-out text: python bench/stage.py pretrain 20000 train.minutes=1

The number is that of held-out tokens: on all of them an evaluation takes longer than some of the runs of bench/train.py.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, Python looks for modules in bench/ only

from pocketgpt import evaluation
from pocketgpt.errors import run

if __name__ == "__main__":
    _, stage, tokens, *overrides = sys.argv
    evaluation.MAX_VAL_TOKENS = int(tokens)
    sys.argv = [f"{stage}.py", *overrides]
    run(importlib.import_module(stage).main)
