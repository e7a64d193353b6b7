"""What training teaches per minute: this project beside nanoGPT's recipe, transformers and trl, on one machine.

    pip install -r requirements-bench.txt     # what is missing gives null
    python bench/train.py quick=true

Every contender has about the same parameters, the same text (Shakespeare without drills, two plays held out) and the same tokens per
step, and trains in a process of its own, one after another:

    f32     nanoGPT's recipe: pretrain.py model=gpt2 optim=adamw, 1e-3, cosine, float32, eager
    bf16    the same in bfloat16, compiled; compiling counts and is reported apart
    hf      transformers' Trainer, Llama shape, bfloat16
    adamw   our shape and schedule under AdamW, the best of `lrs`
    ours    pretrain.py as it is

A baseline trains for `minutes`. Ours then runs with one budget after another, each a whole run with its decay, and the smallest whose
held-out bits per byte are at most the baseline's is its time to that baseline. Evaluations are outside of every clock.

quick=true has one seed and fits into `seconds`: a first short run of ours shows what a run costs beside its training, and the
baselines get an equal part of what is left (some 35 s each on two cores; adamw half and hf a third of it). There bf16 is not
compiled: compiling takes most of such a run, and the recipe without it is the stronger baseline. The goals' budgets are tried first,
others while time is left. Held out are 10,000 tokens instead of 100,000.

sft and dpo: sft.py and dpo.py beside trl's SFTTrainer and DPOTrainer, from the same model, on the same rows for as many steps; the seconds of
the first step are left out, those of the reference's log-probabilities are not. The last line is one JSON object.
"""

from __future__ import annotations

import json
import math
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

import pretrain
from data import shakespeare
from pocketgpt import config, device, tasks
from pocketgpt.corpus import Corpus, prepare
from pocketgpt.errors import UserError, run
from pocketgpt.files import atomic_path, write_text
from pocketgpt.metrics import console, read_jsonl

SHAPES = {"tiny": (2, 192), "12m": (6, 384), "124m": (17, 768)}  # blocks, width; 17 make up for GPT-2's 50k vocabulary
BASELINES = {"f32": 1 / 10, "bf16": 1 / 6, "adamw": 1 / 2.5}  # name -> the share of its time that is our goal
FRACTIONS = (1 / 20, 1 / 14, 1 / 10, 1 / 8, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2.5, 1 / 2, 1 / 1.5, 1)
SFT_STEPS, DPO_STEPS, PAIRS = (60, 8), (30, 5), 32  # (full, quick); pairs per step, the default of dpo.py
QUICK = {"hf": 1 / 3, "adamw": 1 / 2}  # what they get of the time of the other baselines
STAGES_S = 80.0  # seconds of a quick run that sft and dpo take


@dataclass
class Config:
    """See configs/bench/train.yaml for units and meaning."""

    quick: bool
    seconds: float
    minutes: float
    seeds: list[int]
    lrs: list[float]
    shape: str
    step_tokens: int
    ours: list[str]
    parts: list[str]
    device: str
    work: str
    out: str

    def check(self) -> None:
        if self.shape not in ("auto", *SHAPES):
            raise UserError(f"shape is {self.shape!r}: choose auto, {', '.join(SHAPES)}")
        if not self.parts or {*self.parts} - {"pretrain", "sft", "dpo"}:
            raise UserError(f"parts is {self.parts}: choose some of pretrain, sft, dpo")
        if not (self.seeds and self.lrs and self.seconds > 0 and 0 < self.minutes < math.inf and self.step_tokens >= 0):
            raise UserError("seeds and lrs must not be empty, seconds and minutes above 0, step_tokens not below 0")


def model_keys(kind: str, n_layer: int, width: int) -> list[str]:
    """Keys of pretrain.py for a shape of about 12 n_layer width^2 parameters beside the embedding."""
    heads = width // 64
    sizes = {"n_layer": n_layer, "n_embd": width, "n_head": heads}
    if kind == "qwen3":  # grouped queries as in the default shape; what that saves goes into the MLP
        sizes |= {"n_kv_head": heads // 3, "n_inner": round(28 / 9 * width / 64) * 64}
    else:
        sizes |= {"block_size": 256}
    if kind == "llama":
        sizes |= {"n_kv_head": heads}
    return [f"model={kind}", *(f"model.{key}={value}" for key, value in sizes.items())]


def block_size(kind: str) -> int:
    return 512 if kind == "qwen3" else 256


def summary(rows: Sequence[dict[str, Any]], nats: float = 1.0) -> dict[str, Any]:
    """What the metrics of a stage say. nats: what turns nats per token into the unit of `curve`.

    seconds is the training clock at the last step; the rates leave out the first step, which warms up and compiles.
    """
    steps = [row for row in rows if row["kind"] == "train"]
    first, last = steps[0], steps[-1]
    rate = None
    if last["step"] > first["step"]:
        rate = (last["tokens"] - first["tokens"]) / (last["elapsed_s"] - first["elapsed_s"])
    return {
        "seconds": last["elapsed_s"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_s": rate,
        "mfu": rate and rate * last["mfu"] / last["tokens_per_s"],
        "first_step_s": first["elapsed_s"],
        "peak_bytes": max(row["memory_bytes"] for row in steps),
        "curve": [(row["elapsed_s"], row["tokens"], row["loss"] * nats) for row in steps],
        "held_out": [row for row in rows if row["kind"] == "val"][-1],
    }


def reached(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The fewest seconds whose (seconds, bits per byte) are at most `target`; None where none are."""
    return min((seconds for seconds, bits in points if bits <= target), default=None)


def next_budget(tried: dict[float, float], target: float, ladder: Sequence[float], goal: float) -> float | None:
    """The budget to try next in the search for the smallest that reaches the target: the goal, then by bisection.

    tried: budget in seconds -> bits per byte. None when every budget of the ladder is decided.
    """
    most = min((budget for budget, bits in tried.items() if bits <= target), default=math.inf)
    least = max((budget for budget, bits in tried.items() if bits > target and budget < most), default=0.0)
    undecided = sorted(budget for budget in {*ladder, goal} if least < budget < most)
    if not undecided:
        return None
    return goal if goal in undecided else undecided[len(undecided) // 2]


def ratio(a: float | None, b: float | None) -> float | None:
    return round(a / b, 3) if a and b else None


def middle(values: Sequence[float | None]) -> float | None:
    """Mean over seeds; None where a seed has no number."""
    found = [value for value in values if value is not None]
    return round(statistics.fmean(found), 3) if found and len(found) == len(values) else None


class Bench:
    """The runs that were made, their rows, and what could not be had."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.began = time.perf_counter()
        self.device = device.pick_device(cfg.device)
        self.layers, self.width = SHAPES[cfg.shape if cfg.shape != "auto" else self.by_device("12m", "124m")]
        self.step_tokens = cfg.step_tokens or self.by_device(4096, 65536)
        self.work, self.out = Path(cfg.work).resolve(), Path(cfg.out)
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = self.out / "train.log"
        write_text(self.log, "")
        self.bf16 = device.pick_dtype("auto", self.device)[0] == torch.bfloat16
        self.data = ["data.generate=0", f"cache={self.work / 'cache'}"]
        self.heldout = 10_000 if cfg.quick else 100_000
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.overhead = 0.0  # seconds that a run takes beside its training, at most so far
        self.longest = 0.0  # seconds of training behind the model that sft and dpo start from

    def by_device(self, cpu: Any, gpu: Any) -> Any:
        return cpu if self.device.type == "cpu" else gpu

    def left(self) -> float:
        """Seconds until a quick run must have ended."""
        return self.cfg.seconds - (time.perf_counter() - self.began) if self.cfg.quick else math.inf

    def corpus(self) -> Corpus:
        cfg = config.load("pretrain", pretrain.Config, self.data)
        return prepare(*pretrain.documents(cfg.data), cfg.vocab_size, Path(cfg.cache))

    def call(self, *command: str) -> tuple[str, str]:
        """(what a program of this folder printed, "") or ("", why it gave nothing)."""
        wait = None if self.left() == math.inf else max(1.0, self.left())
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n{' '.join(command)}\n")
            log.flush()
            try:
                done = subprocess.run(
                    [sys.executable, str(ROOT / "bench" / command[0]), *command[1:]],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    timeout=wait,
                    cwd=ROOT,
                )
            except subprocess.TimeoutExpired:
                return "", "the time was over"
            log.write(done.stdout)
        return (done.stdout, "") if done.returncode == 0 else ("", f"ended with code {done.returncode}, see {self.log}")

    def stage(self, name: str, *keys: str) -> tuple[list[dict[str, Any]], str]:
        """(the metrics of a stage script of ours run with these keys, "") or ([], why there are none)."""
        out = self.work / name
        shutil.rmtree(out, ignore_errors=True)
        settled = [f"out={out}", f"device={self.device.type}", "train.eval_every=1000000"]
        _, why = self.call("stage.py", name, str(self.heldout), *settled, *keys)
        stem = {"pretrain": "base"}.get(name, name)
        return ([], why) if why else (read_jsonl(out / f"metrics_{stem}.jsonl"), "")

    def peer(self, kind: str, **spec: Any) -> dict[str, Any] | None:
        common: dict[str, Any] = {
            "kind": kind,
            "device": self.device.type,
            "work": str(self.work / "peer"),
            "data": self.data,
        }
        common |= {"heldout": self.heldout, "step_tokens": self.step_tokens, "bf16": self.bf16, "seed": 1}
        said, why = self.call("peers.py", json.dumps(common | spec))
        found = json.loads(said.splitlines()[-1]) if said else {"missing": why}
        if "missing" in found:
            self.notes.append(f"{'transformers' if kind == 'trainer' else 'trl'}, {kind}: {found['missing']}")
            return None
        return dict(found)

    def keep(self, name: str, seed: int, budget: float, found: dict[str, Any]) -> dict[str, Any]:
        row = {"contender": name, "seed": seed, "budget_s": round(budget, 2), **found}
        self.rows.append(row)
        rate = row["tokens_per_s"]
        self.say(
            f"{name}, seed {seed}: {row['bits_per_byte']:.3f} bits/byte after {row['seconds']:.1f} s, {row['steps']} steps"
            + (f" at {rate:,.0f} tokens/s, MFU {row['mfu']:.0%}" if rate else "")
        )
        return row

    def say(self, text: str) -> None:
        console.print(f"{time.perf_counter() - self.began:5.0f} s  {text}", markup=False)

    def pretrain(self, name: str, seed: int, seconds: float, lr: float = 0.0) -> dict[str, Any] | None:
        """A run of pretrain.py; None where it gave nothing."""
        kind = "gpt2" if name in ("f32", "bf16") else "qwen3"
        batch = max(1, self.step_tokens // block_size(kind))
        keys = [*self.data, *model_keys(kind, self.layers, self.width), f"train.minutes={seconds / 60:.5f}"]
        keys += [
            f"train.batch_size={batch}",
            f"train.micro_batch_size={batch}",
            f"train.seed={seed}",
            "sample_tokens=1",
        ]
        if kind == "gpt2":
            compiled = name == "bf16" and not self.cfg.quick
            keys += [
                "optim=adamw",
                "train.lr=0.001",
                "train.warmup=0.02",
                "train.decay=0.98",
                "train.decay_shape=cosine",
            ]
            keys += [f"train.dtype={'float32' if name == 'f32' else 'bfloat16'}", f"train.compile={compiled}"]
        elif name == "adamw":
            keys += ["optim=adamw", f"train.lr={lr}"]
        else:
            keys += self.cfg.ours
        start = time.perf_counter()
        rows, why = self.stage("pretrain", *keys)
        if why:
            self.notes.append(f"{name}, seed {seed}, {seconds:.0f} s: {why}")
            return None
        found = summary(rows, self.bits_per_nat)
        found["bits_per_byte"] = found.pop("held_out")["bits_per_byte"]
        if name == "bf16" and not self.cfg.quick and found["tokens_per_s"]:
            found["compile_s"] = found["first_step_s"] - self.step_tokens / found["tokens_per_s"]
        self.overhead = max(self.overhead, time.perf_counter() - start - found["seconds"])
        if name == "ours" and seconds >= self.longest:
            self.longest = seconds
            shutil.copytree(self.work / "pretrain" / "base", self.work / "start", dirs_exist_ok=True)
        return self.keep(name, seed, seconds, found | ({"lr": lr} if lr else {}))

    def trainer(self, seed: int, seconds: float) -> None:
        model = model_keys("llama", self.layers, self.width)
        found = self.peer("trainer", seconds=seconds, seed=seed, model=model)
        if found:
            found["curve"] = [(s, tokens, loss * self.bits_per_nat) for s, tokens, loss in found["curve"]]
            self.keep("hf", seed, seconds, found)

    def race(self) -> None:
        """All of pretraining."""
        corpus = self.corpus()
        file = corpus.train[0]
        self.bits_per_nat = len(file) / file.meta["bytes"] / math.log(2)
        if self.cfg.quick:
            self.quick_race(self.cfg.seeds[0])
            return
        full = 60 * self.cfg.minutes
        best_lr = 0.0
        for seed in self.cfg.seeds:
            found: dict[str, dict[str, Any] | None] = {}
            found["f32"] = self.pretrain("f32", seed, full)
            found["bf16"] = self.pretrain("bf16", seed, full)
            self.trainer(seed, full)
            tuned = [self.pretrain("adamw", seed, full, lr) for lr in ([best_lr] if best_lr else self.cfg.lrs)]
            found["adamw"] = min((row for row in tuned if row), key=lambda row: row["bits_per_byte"], default=None)
            best_lr = found["adamw"]["lr"] if found["adamw"] else 0.0
            self.search(seed, found)

    def quick_race(self, seed: int) -> None:
        first = self.pretrain("ours", seed, 4.0)
        if not first:
            raise UserError(f"our own training failed: {self.notes[-1]}")
        stages = STAGES_S if {"sft", "dpo"} & {*self.cfg.parts} else 0.0
        fixed = stages + 9 * self.overhead + 10  # eight runs, one of them slower to evaluate, and the plot
        goals = BASELINES["f32"] + BASELINES["bf16"] + BASELINES["adamw"] * QUICK["adamw"]
        each = max(4.0, (self.left() - fixed) / (2 + sum(QUICK.values()) + goals))
        self.say(f"a run takes {self.overhead:.1f} s beside its training: {each:.0f} s for each baseline")
        found = {name: self.pretrain(name, seed, each) for name in ("f32", "bf16")}
        self.trainer(seed, each * QUICK["hf"])
        lr = self.cfg.lrs[len(self.cfg.lrs) // 2]
        found["adamw"] = self.pretrain("adamw", seed, each * QUICK["adamw"], lr)
        self.search(seed, found, stages + 5)

    def search(self, seed: int, baselines: dict[str, dict[str, Any] | None], reserve: float = 0.0) -> None:
        """Runs of ours, budget by budget, until it is known which is the smallest to reach each baseline."""
        tried = {row["budget_s"]: row["bits_per_byte"] for row in self.ours(seed)}
        while True:
            wanted = []
            for name, row in baselines.items():
                if row is None:
                    continue
                ladder = [round(row["budget_s"] * share, 2) for share in FRACTIONS]
                goal = round(row["budget_s"] * BASELINES[name], 2)
                budget = next_budget(tried, row["bits_per_byte"], ladder, goal)
                wanted += [] if budget is None else [(goal in tried, budget)]
            fits = [pair for pair in sorted(wanted) if pair[1] + 1.2 * self.overhead + reserve < self.left()]
            if not fits:  # the goals come first
                if wanted:
                    self.notes.append(f"budgets from {min(b for _, b in wanted):.1f} s on: no time was left for them")
                return
            budget = fits[0][1]
            run = self.pretrain("ours", seed, budget)
            tried[budget] = run["bits_per_byte"] if run else math.inf

    def ours(self, seed: int) -> list[dict[str, Any]]:
        return self.of("ours", seed)

    def of(self, name: str, seed: int) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["contender"] == name and row["seed"] == seed]

    def best(self, name: str, seed: int) -> dict[str, Any] | None:
        return min(self.of(name, seed), key=lambda row: row["bits_per_byte"], default=None)

    def times(self, name: str) -> list[float | None]:
        """For each seed the share of a baseline's time in which ours learns as much."""
        shares = []
        for seed in self.seeds():
            row = self.best(name, seed)
            points = [(ours["seconds"], ours["bits_per_byte"]) for ours in self.ours(seed)]
            shares.append(ratio(reached(points, row["bits_per_byte"]), row["seconds"]) if row else None)
        return shares

    def seeds(self) -> list[int]:
        return self.cfg.seeds[:1] if self.cfg.quick else self.cfg.seeds

    def rate(self, name: str, of: str = "tokens_per_s") -> float | None:
        """Of the longest run of each seed."""
        runs = [max(self.of(name, seed), key=lambda row: row["seconds"], default=None) for seed in self.seeds()]
        values = [row[of] for row in runs if row and row[of]]
        return statistics.fmean(values) if values else None

    def start(self) -> bool:
        """Whether there is a model for sft and dpo to start from; one is trained for a moment if not."""
        if not self.longest:
            self.corpus()
            self.bits_per_nat = 1.0
            self.pretrain("ours", self.cfg.seeds[0], 5.0)
        return self.longest > 0

    def sft(self) -> dict[str, Any] | None:
        """sft.py and trl's SFTTrainer; metric: nats per supervised token, held out."""
        steps = SFT_STEPS[self.cfg.quick]
        path = self.work / "conversations.jsonl"
        found = tasks.conversations(150 * steps, seed=0, speeches=shakespeare.speeches())
        write_text(path, "".join(json.dumps({"messages": row["messages"]}) + "\n" for row in found))
        keys = ["data=mine", f"data.path={path}", "data.val_fraction=0.05"]
        mine, why = self.stage(
            "sft", *keys, f"checkpoint={self.work / 'start'}", f"train.steps={steps}", "train.minutes=0"
        )
        if why:
            self.notes.append(f"sft: {why}")
            return None
        ours = summary(mine)
        theirs = self.peer("sft", keys=keys, start=str(self.work / "start"), steps=steps)
        if theirs:
            ours["samples_per_s"] = ours["tokens_per_s"] / theirs["tokens_per_sample"]
        ours["metric"] = ours["held_out"]["loss"]
        return {"ours": ours, "trl": theirs}

    def dpo(self) -> dict[str, Any] | None:
        """dpo.py and trl's DPOTrainer; metric: share of held-out pairs whose chosen answer has the higher reward."""
        steps = DPO_STEPS[self.cfg.quick]
        speeches = shakespeare.speeches()
        families = ["story", "reverse", "add", "count"] + (["line"] if speeches else [])
        total = round(PAIRS * steps / 0.8)
        items = tasks.make_items(
            -(-total // len(families)), heldout=False, seed=1, speeches=speeches, families=families
        )
        shifted = [*items[1:], items[0]]  # the answer to another question of the family, but for the last of each
        rows = [
            {"prompt": item.messages, "chosen": item.answer, "rejected": other.answer}
            for item, other in zip(items, shifted, strict=True)
            if item.answer != other.answer
        ][:total]
        path = self.work / "pairs.jsonl"
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        keys = ["data=mine", f"data.path={path}", "data.val_fraction=0.2", "dpo.chosen_nll=0", "train.lr=0.001"]
        start = self.work / "sft" / "sft"
        if not start.exists():
            start = self.work / "start"
        more = [f"checkpoint={start}", f"train.steps={steps}", "train.minutes=0", "train.log_every=1"]
        mine, why = self.stage("dpo", *keys, *more)
        if why:
            self.notes.append(f"dpo: {why}")
            return None
        ours = summary(mine)
        about = json.loads((self.work / "dpo" / "run_dpo.json").read_text(encoding="utf-8"))
        timed = ours["steps"] - 1
        seconds = ours["seconds"] - ours["first_step_s"] + about["reference_s"] * timed / ours["steps"]
        ours |= {"samples_per_s": PAIRS * timed / seconds, "metric": ours["held_out"]["accuracy"]}
        ours |= {"margin": ours["held_out"]["margin"]}
        return {"ours": ours, "trl": self.peer("dpo", keys=keys, start=str(start), steps=steps)}

    def results(self, stages: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
        """What the last line says."""
        found: dict[str, Any] = {}
        for name, key in (
            ("f32", "time_to_baseline_f32"),
            ("bf16", "time_to_baseline_bf16"),
            ("adamw", "time_to_adamw"),
        ):
            shares = self.times(name)
            found |= {key: middle(shares), f"{key}_by_seed": shares}
        mine = self.rate("ours")
        found["tokens_per_s_vs_f32"] = ratio(mine, self.rate("f32"))
        found["tokens_per_s_vs_transformers"] = ratio(mine, self.rate("hf"))
        found["mfu"] = middle([self.rate("ours", "mfu")])
        for name in ("sft", "dpo"):
            pair = stages.get(name)
            rows = {who: row for who, row in pair.items() if row} if pair else {}
            found[f"{name}_vs_trl"] = ratio(*(rows.get(who, {}).get("samples_per_s") for who in ("ours", "trl")))
            found[f"{name}_metric"] = {who: round(row["metric"], 3) for who, row in rows.items()} or None
        found["baseline_s"] = middle([self.rate("f32", "seconds")])
        found["bits_per_byte"] = {}
        for name in dict.fromkeys(row["contender"] for row in self.rows):
            best = [self.best(name, seed) for seed in self.seeds()]
            found["bits_per_byte"][name] = [round(row["bits_per_byte"], 4) if row else None for row in best]
        found["quick"], found["machine"] = self.cfg.quick, device.describe(self.device)
        found["minutes"] = round((time.perf_counter() - self.began) / 60, 2)
        return found

    def table(self) -> None:
        columns = "contender seed budget bits/byte tokens tokens/s MFU first_step peak_MB".split()
        table = Table(*columns, title=f"{self.layers} x {self.width}, {self.step_tokens:,} tokens a step")
        for row in self.rows:
            rate, mfu = row["tokens_per_s"], row["mfu"]
            cells = [row["contender"], str(row["seed"]), f"{row['seconds']:.1f} s", f"{row['bits_per_byte']:.3f}"]
            cells += [f"{row['tokens']:,}", f"{rate:,.0f}" if rate else "", f"{mfu:.0%}" if mfu else ""]
            table.add_row(*cells, f"{row['first_step_s']:.1f} s", f"{row['peak_bytes'] / 2**20:,.0f}")
        console.print(table)

    def plot(self, path: Path) -> None:
        """Bits per byte against seconds and tokens: lines are training loss, marks are held-out text at the end of a run."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
        names = list(dict.fromkeys(row["contender"] for row in self.rows))
        for which, (axis, label) in enumerate(zip(axes, ("seconds of training", "tokens"), strict=True)):
            for color, name in enumerate(names):
                rows = [row for row in self.rows if row["contender"] == name]
                for row in rows:
                    curve = [(point[which], point[2]) for point in row["curve"]]
                    axis.plot(*zip(*curve, strict=True), color=f"C{color}", lw=0.7, alpha=0.4) if curve else None
                ends = [(row["seconds"] if which == 0 else row["tokens"], row["bits_per_byte"]) for row in rows]
                axis.plot(*zip(*ends, strict=True), "o", color=f"C{color}", ms=5, label=name)
            axis.set(xlabel=label, xscale="log")
            axis.grid(alpha=0.3)
        lowest = min((row["bits_per_byte"] for row in self.rows), default=1.0)
        axes[0].set(ylabel="bits per byte (marks: held out)", ylim=(lowest - 0.3, 4.5))
        axes[0].legend(fontsize=8)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
        plt.close(figure)


def main() -> None:
    cfg = config.load("bench/train", Config)
    cfg.check()
    bench = Bench(cfg)
    console.print(device.describe(bench.device), markup=False)
    if "pretrain" in cfg.parts:
        bench.race()
    stages: dict[str, dict[str, Any] | None] = {}
    for name in ("sft", "dpo"):
        if name in cfg.parts and bench.start():
            stages[name] = getattr(bench, name)()
            for who, row in (stages[name] or {}).items():
                rate = row and row.get("samples_per_s")
                if row and rate:
                    bench.say(f"{name}, {who}: {rate:.1f} samples/s, held out {row['metric']:.3f}")
    bench.table()
    for line in bench.notes:
        console.print(f"not measured: {line}", markup=False)
    if bench.rows:
        bench.plot(bench.out / "train.png")
    results = bench.results(stages)
    lines = [results, *bench.rows, *({"stage": name, **pair} for name, pair in stages.items() if pair)]
    write_text(bench.out / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    console.print(f"numbers {bench.out / 'train.jsonl'}, plot {bench.out / 'train.png'}", markup=False)
    print(json.dumps(results))


if __name__ == "__main__":
    run(main)
