"""One process and several on the same steps: tokens/s, what of a step goes to the others, and one loss curve.

    python bench/scale.py quick=true
    python bench/scale.py processes=[1,2,4,8] keys=[model=350m,train.batch_size=64,train.micro_batch_size=8]   # on GPUs

Every run is pretrain.py under torchrun on the same rows, with the same batch for the whole step, so with more processes each
has less to do (strong scaling). The runs take turns; a rate is the median over the steps of all rounds. On a CPU each process has
`threads` threads.

    scaling efficiency    tokens/s / (tokens/s of the first run x processes of one over the other)
    apart                 the same for as many single processes side by side that never meet, with their part of the batch each:
                          what the machine itself gives when more of it is busy
    communication share   of a step's seconds, what a process spends in exchanges with others, mean over processes. It has
    exchange share        in it the waiting for who comes later; of each exchange the shortest time of any process has not
    loader share          of a step's seconds, what the first process waits for its batches

The last line is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, Python looks for modules in bench/ only

import torch
from rich.table import Table

from pocketgpt import config, device
from pocketgpt.errors import UserError, run
from pocketgpt.files import atomic_path, write_text
from pocketgpt.metrics import console, read_jsonl

WARM_UP = 2  # steps of a run that are not timed
QUICK = (2, 14)  # rounds and steps
Notes = list[tuple[float, list[float]]]  # of a process, as bench/waiting.py writes them


@dataclass
class Config:
    """See configs/bench/scale.yaml for units and meaning."""

    quick: bool
    processes: list[int]
    rounds: int
    steps: int
    threads: int
    keys: list[str]
    device: str
    work: str
    out: str

    def check(self) -> None:
        if not self.processes or min(self.processes) < 1 or len({*self.processes}) < len(self.processes):
            raise UserError(f"processes is {self.processes}: give different numbers from 1 on")
        if self.rounds < 1 or self.threads < 1 or self.steps < WARM_UP + 2:
            raise UserError(f"rounds and threads must be at least 1, steps at least {WARM_UP + 2}")


def shares(ranks: Sequence[Notes]) -> dict[str, Any]:
    """Seconds of each step after the warm-up, and what share of all of them goes to exchanges.

    ranks: the notes of every process, on the same steps. Exchanges are the same ones in each, in the same order.
    """
    updates = [clock for clock, _ in ranks[0]][WARM_UP - 1 :]
    seconds = [end - start for start, end in itertools.pairwise(updates)]
    exchanges = [[notes[1] for notes in rank[WARM_UP:]] for rank in ranks]
    spent = sum(took for rank in exchanges for step in rank for took in step) / len(ranks)
    alone = sum(min(each) for steps in zip(*exchanges, strict=True) for each in zip(*steps, strict=True))
    return {
        "step_s": seconds,
        "communication_share": spent / sum(seconds),
        "exchange_share": alone / sum(seconds),
    }


class Bench:
    """The runs, in the order in which they were made."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.began = time.perf_counter()
        self.device = device.pick_device(cfg.device)
        if self.device.type == "cuda" and max(cfg.processes) > torch.cuda.device_count():
            raise UserError(f"processes is {cfg.processes}: there are {torch.cuda.device_count()} GPUs")
        self.rounds, self.steps = QUICK if cfg.quick else (cfg.rounds, cfg.steps)
        self.work, self.out = Path(cfg.work).resolve(), Path(cfg.out)
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = self.out / "scale.log"
        write_text(self.log, "")
        torch.set_num_threads(cfg.threads)
        self.dtype, why = device.pick_dtype("auto", self.device)
        console.print(f"{device.describe(self.device)} for each process; {why}", markup=False)
        self.rows: list[dict[str, Any]] = []

    def start(self, folder: Path, processes: int, gpu: int, *keys: str) -> subprocess.Popen[bytes]:
        """pretrain.py on so many processes; notes, metrics and checkpoint in `folder`. gpu: the first one's."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [str(ROOT / "bench" / "waiting.py"), str(folder), "10000", "pretrain"]
        command += ["data.generate=0", "sample_tokens=1", "train.micro_batch_size=2", *self.cfg.keys, *keys]
        command += [f"train.steps={self.steps}", "train.minutes=0", "train.eval_every=1000000", "train.log_every=1"]
        command += [f"train.dtype={str(self.dtype).removeprefix('torch.')}", f"device={self.device.type}"]
        command += [f"cache={self.work / 'cache'}", f"out={folder}"]
        settings = {"OMP_NUM_THREADS": str(self.cfg.threads)}
        if self.device.type == "cuda":
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpu, gpu + processes)))
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n{' '.join(command)}\n")
            log.flush()
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | settings)

    def wait(self, *runs: subprocess.Popen[bytes]) -> None:
        try:
            codes = [each.wait() for each in runs]
        finally:
            for each in runs:
                each.terminate()  # which torchrun passes on; nothing where it has ended
        if any(codes):
            raise UserError(f"a run ended with code {max(codes, key=abs)}: see {self.log}")

    def shared(self, number: int, processes: int) -> None:
        """One run whose processes share the batch."""
        folder = self.work / f"{processes}"
        self.wait(self.start(folder, processes, 0))
        rows = read_jsonl(folder / "metrics_base.jsonl")
        steps = [row for row in rows if row["kind"] == "train"]
        found = shares([json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(processes)])
        self.tokens = steps[0]["tokens"]  # of a step
        held_out = [row["bits_per_byte"] for row in rows if row["kind"] == "val"][-1]
        found |= {"held_out": held_out, "loss": [row["loss"] for row in steps]}
        found |= {"loader_share": statistics.fmean(row["loader_share"] for row in steps[WARM_UP:])}
        self.keep("shared", number, processes, found)

    def apart(self, number: int, processes: int) -> None:
        """As many runs of one process at the same time, each with its part of the batch."""
        train = json.loads((self.work / f"{processes}" / "run_base.json").read_text("utf-8"))["config"]["train"]
        batch = f"train.batch_size={max(1, train['batch_size'] // processes)}"
        folders = [self.work / f"apart{rank}" for rank in range(processes)]
        self.wait(*(self.start(folder, 1, rank, batch) for rank, folder in enumerate(folders)))
        notes = [json.loads((folder / "0.json").read_text("utf-8")) for folder in folders]
        self.keep("apart", number, processes, {"step_s": [s for each in notes for s in shares([each])["step_s"]]})

    def keep(self, kind: str, number: int, processes: int, found: dict[str, Any]) -> None:
        row = {"kind": kind, "round": number, "processes": processes, "step_tokens": self.tokens} | found
        self.rows.append(row)
        console.print(
            f"{time.perf_counter() - self.began:5.0f} s  {processes} {kind}: "
            f"{self.tokens / statistics.median(row['step_s']):,.0f} tokens/s",
            markup=False,
        )

    def race(self) -> None:
        for number in range(1, self.rounds + 1):
            for processes in self.cfg.processes:
                self.shared(number, processes)
                if processes > 1:
                    self.apart(number, processes)

    def results(self) -> dict[str, Any]:
        found = results(self.rows)
        found |= {"rounds": self.rounds, "steps": self.steps, "quick": self.cfg.quick}
        found |= {"dtype": str(self.dtype).removeprefix("torch."), "machine": device.describe(self.device)}
        return found | {"minutes": round((time.perf_counter() - self.began) / 60, 2)}

    def plot(self, path: Path) -> None:
        """Left the losses of all numbers of processes, the last ones dashed on top of the first; right the rates."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(2, 1))
        firsts = [row for row in self.rows if row["kind"] == "shared" and row["round"] == 1]
        for place, row in enumerate(firsts):
            style = {"lw": 5, "alpha": 0.35} if place == 0 else {"lw": 1.5, "ls": (0, (4, 2 * place))}
            label = f"{row['processes']} process{'es' * (row['processes'] > 1)}"
            axes[0].plot(range(1, len(row["loss"]) + 1), row["loss"], color=f"C{place}", label=label, **style)
        axes[0].set(xlabel="optimizer step", ylabel="training loss (nats/token)")
        found = results(self.rows)
        names = list(found["tokens_per_s"])
        ideal = [found["tokens_per_s"][names[0]] * int(name) / int(names[0]) for name in names]
        axes[1].plot(names, ideal, color="grey", ls=":", label="as many times the first")
        axes[1].plot(names, list(found["tokens_per_s"].values()), "o-", color="C0", label="sharing a batch")
        if found["tokens_per_s_apart"]:
            axes[1].plot(*zip(*found["tokens_per_s_apart"].items(), strict=True), "x", color="C1", label="apart")
        axes[1].set(xlabel="processes", ylabel="tokens/s", ylim=(0, None))
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend()
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
        plt.close(figure)


def results(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds: medians, by the number of processes. The distance of two loss curves is the largest of any step."""
    shared = [row for row in rows if row["kind"] == "shared"]
    numbers = list(dict.fromkeys(row["processes"] for row in shared))

    def rate(kind: str, processes: int) -> float | None:
        runs = [row for row in rows if row["kind"] == kind and row["processes"] == processes]
        seconds = [second for row in runs for second in row["step_s"]]
        return runs[0]["step_tokens"] / statistics.median(seconds) if runs else None

    one = rate("shared", numbers[0])
    assert one is not None
    found: dict[str, Any] = {
        "tokens_per_s": {},
        "tokens_per_s_apart": {},
        "scaling_efficiency": {},
        "efficiency_apart": {},
    }
    found |= {"communication_share": {}, "exchange_share": {}, "loader_share": {}}
    found |= {"loss_distance": {}, "held_out_bits_per_byte": {}}
    for processes in numbers:
        key, mine = str(processes), [row for row in shared if row["processes"] == processes]
        for name, efficiency, kind in (
            ("tokens_per_s", "scaling_efficiency", "shared"),
            ("tokens_per_s_apart", "efficiency_apart", "apart"),
        ):
            if measured := rate(kind, processes):
                found[name][key] = round(measured, 1)
                found[efficiency][key] = round(measured / one * numbers[0] / processes, 3)
        for name in ("communication_share", "exchange_share", "loader_share"):
            found[name][key] = round(statistics.median(row[name] for row in mine), 4)
        distances = [abs(a - b) for a, b in zip(mine[0]["loss"], shared[0]["loss"], strict=True)]
        found["loss_distance"][key] = round(max(distances), 6)
        found["held_out_bits_per_byte"][key] = round(mine[0]["held_out"], 4)
    return found


def table(found: dict[str, Any]) -> Table:
    columns = ("processes", "tokens/s", "efficiency", "apart", "waiting", "exchange", "loss differs")
    rows = Table(*columns)
    for key, rate in found["tokens_per_s"].items():
        apart = found["efficiency_apart"].get(key)
        cells = [
            key,
            f"{rate:,.0f}",
            f"{found['scaling_efficiency'][key]:.0%}",
            "" if apart is None else f"{apart:.0%}",
        ]
        cells += [f"{found[name][key]:.1%}" for name in ("communication_share", "exchange_share")]
        rows.add_row(*cells, f"{found['loss_distance'][key]:.4f}")
    return rows


def main() -> None:
    cfg = config.load("bench/scale", Config)
    cfg.check()
    bench = Bench(cfg)
    bench.race()
    found = bench.results()
    console.print(table(found))
    bench.plot(bench.out / "scale.png")
    write_text(bench.out / "scale.jsonl", "".join(json.dumps(line) + "\n" for line in [found, *bench.rows]))
    console.print(f"numbers {bench.out / 'scale.jsonl'}, plot {bench.out / 'scale.png'}", markup=False)
    print(json.dumps(found))


if __name__ == "__main__":
    run(main)
