#!/usr/bin/env bash
# What needs a GPU, in under 8 minutes on one: bash bench/gpu.sh, or PYTHON=.venv/bin/python bash bench/gpu.sh
# The tests marked cuda, bench/train.py and bench/decode.py; the last line is one JSON object, null where one of them failed.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device: bench/gpu.sh has nothing to measure here" >&2
    exit 1
fi
OUT=${OUT:-bench/results/gpu}
mkdir -p "$OUT"
timeout 60 "$PYTHON" -m pytest -m cuda -q 2>&1 | tee "$OUT/tests.txt"
timeout 200 "$PYTHON" bench/train.py device=cuda quick=true seconds=180 out="$OUT" | tee "$OUT/train.txt"
timeout 210 "$PYTHON" bench/decode.py device=cuda quick=true 'shapes=[124m]' 'precisions=[float32,bfloat16]' repeats=2 out="$OUT" | tee "$OUT/decode.txt"
"$PYTHON" - "$OUT" <<'END'
import json
import sys
from pathlib import Path

import torch


def last(name):
    lines = (Path(sys.argv[1]) / f"{name}.txt").read_text().splitlines() or [""]
    try:
        return json.loads(lines[-1]) if name != "tests" else lines[-1]
    except ValueError:
        return None


found = {"gpu": torch.cuda.get_device_name(), **{name: last(name) for name in ("tests", "train", "decode")}}
print(json.dumps(found))
good = found["train"] and found["decode"] and "passed" in found["tests"] and "failed" not in found["tests"]
sys.exit(not good)
END
