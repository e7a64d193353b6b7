"""One training step in several forms, timed alternately on this machine: python bench/train_step.py --repeats 10

    pretrain   float32 | bfloat16 | bfloat16, compiled | bfloat16, blocks computed again
    sft        float32 | bfloat16 | bfloat16, compiled     packed rows with their mask, a third of the tokens supervised
    dpo        float32 | bfloat16                          pairs, sigmoid loss, reference known

A step is forward, backward and optimizer, on random ids of the demo's sizes. Every form runs once before the clock starts, which is where
compiling happens, and then all forms take turns, so that a machine that slows down slows all of them. The last line is one JSON
object: median and best seconds, tokens/s, and the ratio to float32 of the same stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from base_model import GPT, GPTConfig
from dpo import NUMBERS, preference_loss
from pocketgpt import device as machine
from pocketgpt import kernels
from pocketgpt.evaluation import answer_log_probs
from pocketgpt.loss import IGNORE, linear_cross_entropy
from pocketgpt.optim import OptimConfig, Optimizer
from pocketgpt.packing import attention_mask

MUON = OptimConfig("muon", 0.9, 0.95, 1e-8, 0.1, 0.02, 0.95)
Step = Callable[[], None]


def step_of(
    stage: str, dtype: torch.dtype, compiled: bool, recompute: bool, size: GPTConfig, rows: int, device: torch.device
) -> tuple[Step, int]:
    """A training step with a model and data of its own, and the tokens that run in it."""
    torch.manual_seed(0)
    model = GPT(size).to(device).train()
    model.recompute = recompute
    optimizer = Optimizer(model, MUON, 0.003)
    network = torch.compile(model.hidden_states, dynamic=False) if compiled else model.hidden_states
    length = {"pretrain": size.block_size, "sft": 256, "dpo": 64}[stage]
    ids = torch.randint(size.vocab_size, (rows, length + 1), device=device)
    x, y = ids[:, :-1], ids[:, 1:].clone()
    if stage == "sft":
        y[torch.rand(y.shape, device=device) > 1 / 3] = IGNORE
    if stage == "dpo":
        y[:, : length // 2] = IGNORE
    mask = attention_mask((torch.arange(length, device=device) // 50).expand(rows, -1)) if stage == "sft" else None
    numbers = {key: value for key, value in NUMBERS["sigmoid"].items() if key != "chosen_nll"}
    with torch.no_grad():
        reference = answer_log_probs(model, x, y, dtype) if stage == "dpo" else None

    def loss() -> Tensor:
        if stage == "dpo":
            policy = answer_log_probs(model, x, y, dtype)
            return preference_loss("sigmoid", policy, reference, (y != IGNORE).sum(1), **numbers)[0].sum() / (rows // 2)
        with machine.autocast(device, dtype):
            hidden = network(x, None, mask)
        return linear_cross_entropy(hidden, model.lm_head.weight, y, dtype, model.lm_head.softcap) / int(
            (y != IGNORE).sum()
        )

    def step() -> None:
        loss().backward()
        optimizer.step(1.0)

    return step, x.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each form")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 64, the width of a head")
    parser.add_argument("--vocab", type=int, default=4096, help="ids")
    parser.add_argument("--block", type=int, default=512, help="tokens per row in pretraining, 256 at least")
    parser.add_argument("--rows", type=int, default=8, help="rows per step in pretraining; 12 for sft and 64 for dpo")
    given = parser.parse_args()
    device = machine.pick_device(given.device)
    machine.keep_freed_memory()  # as pocketgpt.trainer does
    size = GPTConfig(given.vocab, given.block, given.layers, given.width // 64, 1, given.width)
    forms = {
        "float32": (torch.float32, False, False),
        "bfloat16": (torch.bfloat16, False, False),
        "bfloat16 compiled": (torch.bfloat16, True, False),
        "bfloat16 recomputed": (torch.bfloat16, False, True),
    }
    if device.type == "cpu" and kernels.compiler() is None:
        print("no C++ compiler found: nothing is compiled", file=sys.stderr)
        del forms["bfloat16 compiled"]
    report: dict[str, object] = {"machine": machine.describe(device), "torch": torch.__version__}
    for stage, rows in (("pretrain", given.rows), ("sft", 12), ("dpo", 64)):
        mine = {
            name: form
            for name, form in forms.items()
            if stage == "pretrain" or name in ("float32", "bfloat16") or (stage == "sft" and "compiled" in name)
        }
        steps = {name: step_of(stage, *form, size, rows, device) for name, form in mine.items()}
        for name, (step, _) in steps.items():
            start = time.perf_counter()
            step()
            machine.synchronize(device)
            print(f"{stage}, {name}: first step {time.perf_counter() - start:.1f} s", file=sys.stderr)
        took: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(given.repeats):
            for name, (step, _) in steps.items():
                start = time.perf_counter()
                step()
                machine.synchronize(device)
                took[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(seconds) for name, seconds in took.items()}
        for name, (_, tokens) in steps.items():
            ratio = medians["float32"] / medians[name]
            print(
                f"{stage:9} {name:20} {1000 * medians[name]:9.1f} ms  {tokens / medians[name]:9,.0f} tok/s  {ratio:.2f}x"
            )
        report[stage] = {
            name: {
                "median_s": medians[name],
                "best_s": min(took[name]),
                "tokens_per_s": tokens / medians[name],
                "vs_float32": medians["float32"] / medians[name],
            }
            for name, (_, tokens) in steps.items()
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
