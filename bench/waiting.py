"""A stage script of several processes that notes how long each of them waits for the others: for bench/scale.py.

    torchrun --nproc-per-node 2 bench/waiting.py NOTES 10000 pretrain out=...

Writes NOTES/RANK.json: for each step the clock at its update, and the seconds of each exchange since the update before it. The
number is that of held-out tokens that are evaluated.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, Python looks for modules in bench/ only

from pocketgpt import distributed, evaluation, optim
from pocketgpt.errors import run

steps: list[tuple[float, list[float]]] = []
exchanges: list[float] = []
together, update = distributed.together, optim.Optimizer.step


@contextmanager
def timed() -> Iterator[None]:
    start = time.perf_counter()
    with together():
        yield
    exchanges.append(time.perf_counter() - start)


def noted(optimizer: optim.Optimizer, scale: float) -> None:
    update(optimizer, scale)
    steps.append((time.perf_counter(), exchanges.copy()))
    exchanges.clear()


if __name__ == "__main__":
    _, notes, tokens, stage, *overrides = sys.argv
    evaluation.MAX_VAL_TOKENS = int(tokens)
    distributed.together, optim.Optimizer.step = timed, noted  # type: ignore[assignment, method-assign]
    sys.argv = [f"{stage}.py", *overrides]
    run(importlib.import_module(stage).main)
    (Path(notes) / f"{distributed.rank()}.json").write_text(json.dumps(steps), encoding="utf-8")
