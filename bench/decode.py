"""Decoding speed of this project, transformers and llama.cpp on the same weights, taking turns on one machine.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0     # beside requirements-dev.txt; what is missing gives null
    python bench/decode.py quick=true

Each engine lives in a process of its own (engines.py) and waits while another one is timed. Every number is a median
over rounds; in each round all engines take turns, so that a busy minute falls on all of them. The last line is one JSON
object of ratios, named as our rate divided by the other's, or by our own.
"""

from __future__ import annotations

import json
import random
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

import weights
from rich.table import Column, Table

from base_model import GPTConfig
from pocketgpt import config, device
from pocketgpt.errors import UserError, run
from pocketgpt.files import atomic_path, write_text
from pocketgpt.metrics import bar, console

CONTEXTS = (64, 512, 2048)  # tokens of the prompt
ROWS = 32
ENGINES = {  # name -> (kind and variant of engines.py, precisions)
    "ours": ("ours", "packed", ("float32", "bfloat16", "int8")),
    "ours, bf16 K/V": ("ours", "bf16kv", ("float32", "bfloat16")),
    "ours, no cache": ("ours", "nocache", ("float32",)),
    "hf dynamic": ("transformers", "dynamic", ("float32", "bfloat16")),
    "hf static": ("transformers", "static", ("float32", "bfloat16")),
    "llama.cpp": ("llamacpp", "", ("float32", "bfloat16", "int8")),
}
SHORT = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}


@dataclass
class Config:
    """See configs/bench/decode.yaml for units and meaning."""

    quick: bool
    shapes: list[str]
    precisions: list[str]
    device: str
    threads: int
    new_tokens: int
    repeats: int
    seed: int
    work: str
    out: str


class Worker:
    """An engine in its own process."""

    def __init__(self, name: str, **spec: Any) -> None:
        self.name = name
        command = [sys.executable, str(Path(__file__).with_name("engines.py"))]
        self.log = Path(spec["log"]).open("a")  # noqa: SIM115  # closed by close()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT
        )
        self.send(spec)

    def send(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def call(self, method: str, *arguments: Any) -> tuple[Any, str]:
        """(result, "") or (None, why there is none)."""
        self.send({"method": method, "arguments": arguments})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None, f"ended with code {self.process.wait()}; see {self.log.name}"
        reply = json.loads(line)
        return reply.get("result"), reply.get("missing") or reply.get("error") or ""

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


class Bench:
    """One shape: the workers, what they measured, and what they could not."""

    def __init__(self, cfg: Config, shape: str) -> None:
        self.cfg, self.shape = cfg, shape
        self.model: GPTConfig = weights.SHAPES[shape]
        self.folder = weights.prepare(Path(cfg.work), self.model, cfg.seed, cfg.precisions, copying=True)
        self.random = random.Random(cfg.seed)
        self.rows: list[dict[str, Any]] = []
        self.seconds: dict[
            tuple[str, str, str, str], list[float]
        ] = {}  # (precision, engine, measure, part) -> per round
        self.tokens: dict[tuple[str, str, str], list[list[int]]] = {}  # (precision, engine, measure) -> rows
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}
        self.notes: list[str] = []

    def spec(self, name: str, precision: str, folder: str = "hf") -> dict[str, Any]:
        kind, variant, _ = ENGINES[name]
        shape = self.model
        sizes = {
            key: getattr(shape, key) for key in ("n_embd", "n_head", "n_kv_head", "n_layer", "vocab_size", "block_size")
        }
        return {
            "kind": kind,
            "variant": variant,
            "precision": precision,
            "folder": str(self.folder if kind == "llamacpp" else self.folder / folder),
            "threads": self.cfg.threads,
            "device": self.cfg.device,
            "config": sizes | {"head_dim": shape.width_of_head, "n_inner": shape.width_of_mlp},
            "longest": max(CONTEXTS) + self.cfg.new_tokens,
            "log": str(Path(self.cfg.out) / "engines.log"),
        }

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.model.vocab_size) for _ in range(length)]

    def start(self, names: Sequence[str], precision: str) -> list[Worker]:
        workers = []
        for name in names:
            worker = Worker(name, **self.spec(name, precision))
            facts, why = worker.call("setup")
            if why:
                self.notes.append(f"{name}, {self.shape}, {precision}: {why}")
                worker.close()
                continue
            if facts["note"]:
                self.notes.append(f"{name}, {self.shape}, {precision}: {facts['note']}")
            self.facts[precision, name] = facts
            workers.append(worker)
        return workers

    def measures(self, precision: str) -> list[tuple[str, str, tuple[Any, ...], Sequence[str]]]:
        """(name, method of the engine, its arguments, parts of its result that are seconds)."""
        n, short = self.cfg.new_tokens, 9 if self.cfg.quick else 33
        parts = ("first_s", "decode_s")
        found: list[tuple[str, str, tuple[Any, ...], Sequence[str]]] = [
            ("ctx64", "decode", (self.prompt(64), n), parts),
            *((f"ctx{length}", "decode", (self.prompt(length), short), parts) for length in CONTEXTS[1:]),
            ("batch32", "batch", ([self.prompt(64) for _ in range(ROWS)], short), parts),
        ]
        if precision == "float32":
            ragged = [self.prompt(self.random.randint(16, 256)) for _ in range(ROWS)]
            found.append(("ragged", "ragged", (ragged, short), ("seconds",)))
            found.append(("sequential", "sequential", (ragged, short), ("seconds",)))
        return found

    def race(self, precision: str) -> None:
        """All engines of one precision, taking turns."""
        names = [name for name, (_, _, known) in ENGINES.items() if precision in known]
        workers = self.start(names, precision)
        measures = self.measures(precision)
        turns = [(w, m) for m in measures for w in workers if may(w.name, m[0])]
        progress, task = bar(f"{self.shape}, {SHORT[precision]}", (self.cfg.repeats + 1) * len(turns))
        broken = set()
        with progress:
            for turn in range(self.cfg.repeats + 1):  # the first warms up
                for worker, (measure, method, arguments, parts) in turns:
                    progress.advance(task)
                    if (worker.name, measure) in broken:
                        continue
                    result, why = worker.call(method, *arguments)
                    if why:
                        broken.add((worker.name, measure))
                        self.notes.append(f"{worker.name}, {self.shape}, {precision}, {measure}: {why}")
                    elif turn:
                        for part in parts:
                            key = (precision, worker.name, measure, part)
                            self.seconds.setdefault(key, []).append(result[part])
                        self.tokens[precision, worker.name, measure] = result["tokens"]
        for worker in workers:
            memory, _ = worker.call("memory")
            self.facts[precision, worker.name] |= memory or {}
            worker.close()
        for name in names:
            for measure, _, arguments, parts in measures:
                self.note(precision, name, measure, arguments, parts)

    def note(self, precision: str, name: str, measure: str, arguments: tuple[Any, ...], parts: Sequence[str]) -> None:
        """One row of results."""
        took = [self.seconds.get((precision, name, measure, part)) for part in parts]
        if not all(took):
            return
        prompts, n = arguments
        rows = prompts if isinstance(prompts[0], list) else [prompts]
        row: dict[str, Any] = {"shape": self.shape, "precision": precision, "engine": name, "measure": measure}
        row |= {part: statistics.median(values) for part, values in zip(parts, took, strict=True) if values}
        row |= {f"{part}_all": values for part, values in zip(parts, took, strict=True)}
        facts = self.facts[precision, name]
        if "decode_s" in row:
            row["decode_tokens_per_s"] = len(rows) * (n - 1) / row["decode_s"]
            row["prefill_tokens_per_s"] = sum(map(len, rows)) / row["first_s"]
            read = facts["weight_bytes"] + facts["kv_bytes"] * sum(len(ids) + n / 2 for ids in rows)
            row["gb_per_s"] = read * (n - 1) / row["decode_s"] / 1e9
        else:
            row["decode_tokens_per_s"] = len(rows) * n / row["seconds"]
        row |= {key: facts[key] for key in ("weight_bytes", "base_bytes", "peak_bytes") if key in facts}
        self.rows.append(row)

    def lookup(self) -> float | None:
        """Speed of prompt lookup over plain decoding, where the text copies itself."""
        worker = Worker("ours", **self.spec("ours", "float32", "copying"))
        passage = [7 * weights.PERIOD + i % weights.PERIOD for i in range(weights.PERIOD + 32)]
        ratios = []
        _, why = worker.call("setup")
        for turn in range(self.cfg.repeats + 1):
            if why:
                break
            result, why = worker.call("lookup", passage, self.cfg.new_tokens)
            if not why and not result["same"]:
                why = "other tokens than plain decoding"
            if turn and not why:
                ratios.append(result["plain_s"] / result["lookup_s"])
        if why:
            self.notes.append(f"prompt lookup, {self.shape}: {why}")
        worker.close()
        return statistics.median(ratios) if ratios and not why else None

    def rate(self, precision: str, name: str, measure: str, of: str = "decode_tokens_per_s") -> float | None:
        wanted = {"precision": precision, "engine": name, "measure": measure}
        found = [row[of] for row in self.rows if wanted.items() <= row.items() and of in row]
        return found[0] if found else None

    def fastest(self, precision: str, measure: str) -> float | None:
        rates = [self.rate(precision, f"hf {kind}", measure) for kind in ("dynamic", "static")]
        return max((rate for rate in rates if rate), default=None)

    def ratios(self, lookup: float | None) -> dict[str, float | None]:
        ours, peer = "ours", "llama.cpp"

        def share(a: float | None, b: float | None) -> float | None:
            return round(a / b, 3) if a and b else None

        def best(rates: list[float | None]) -> float | None:
            return max((rate for rate in rates if rate), default=None)

        found: dict[str, float | None] = {}
        for precision, short in SHORT.items():
            mine = self.rate(precision, ours, "ctx64")
            found[f"decode_vs_llamacpp_{short}"] = share(mine, self.rate(precision, peer, "ctx64"))
            if precision != "int8":
                found[f"decode_vs_transformers_{short}"] = share(mine, self.fastest(precision, "ctx64"))
        found["decode_best_vs_transformers_best"] = share(
            best([self.rate(p, ours, "ctx64") for p in SHORT]), best([self.fastest(p, "ctx64") for p in SHORT])
        )
        plain = self.rate("float32", ours, "ctx64")
        found["cache_vs_nocache"] = share(plain, self.rate("float32", "ours, no cache", "ctx64"))
        for precision, suffix in (("bfloat16", ""), ("float32", "_f32"), ("int8", "_int8")):
            rates = [self.rate(precision, name, "ctx512", "prefill_tokens_per_s") for name in (ours, peer)]
            found[f"prefill512_vs_llamacpp{suffix}"] = share(*rates)
        engine = self.rate("float32", ours, "ragged")
        found["engine32_vs_sequential"] = share(engine, self.rate("float32", ours, "sequential"))
        found["engine32_vs_transformers"] = share(engine, self.fastest("float32", "ragged"))
        found["batch32_vs_llamacpp_f32"] = share(
            self.rate("float32", ours, "batch32"), self.rate("float32", peer, "batch32")
        )
        found["lookup_speedup"] = round(lookup, 3) if lookup else None
        for name, suffix in ((ours, ""), ("ours, bf16 K/V", "_kv_bf16")):
            for precision in ("float32", "bfloat16"):
                near, far = (self.rate(precision, name, measure) for measure in ("ctx64", "ctx2048"))
                found[f"ctx2048_vs_64{suffix}" + "_bf16" * (precision == "bfloat16")] = share(far, near)
        return found

    def agreement(self) -> dict[str, int]:
        """How many of the greedy float32 tokens after the prompt of 64 equal ours, per engine, up to the first other one."""
        mine = self.tokens.get(("float32", "ours", "ctx64"))
        same = {}
        for (precision, name, measure), theirs in self.tokens.items():
            if mine and (precision, measure) == ("float32", "ctx64") and name != "ours":
                pairs = [a == b for a, b in zip(mine[0], theirs[0], strict=True)]
                same[name] = [*pairs, False].index(False)
        return same


def may(name: str, measure: str) -> bool:
    """Which measures an engine takes. Some would take minutes: all without a cache, and batches with a static cache, for
    which transformers compiles again and comes out slower (358 tokens/s against 4,516 of the dynamic one, 32 rows)."""
    if name == "ours, no cache":
        return measure == "ctx64"
    if name == "hf static":
        return measure.startswith("ctx")
    if name == "ours, bf16 K/V":
        return measure in ("ctx64", "ctx2048")
    return {"sequential": name == "ours", "ragged": name != "llama.cpp"}.get(measure, True)


TABLES = {
    "decode": [("64", "ctx64"), ("512", "ctx512"), ("2,048", "ctx2048"), ("32 rows", "batch32")],
    "prefill": [("64", "ctx64"), ("512", "ctx512"), ("2,048", "ctx2048"), ("32 rows", "batch32")],
}


def show(bench: Bench) -> None:
    for kind, columns in TABLES.items():
        of = f"{kind}_tokens_per_s"
        table = Table(
            Column("engine", no_wrap=True), "weights", title=f"{bench.shape}: {kind} by tokens of prompt, tokens/s"
        )
        for title in [title for title, _ in columns] + (["GB/s"] if kind == "decode" else ["peak MB"]):
            table.add_column(title, justify="right")
        for precision in bench.cfg.precisions:
            for name in ENGINES:
                rates = [bench.rate(precision, name, measure, of) for _, measure in columns]
                if not any(rates):
                    continue
                facts, speed = bench.facts[precision, name], bench.rate(precision, name, "ctx64", "gb_per_s")
                peak = f"{(facts['peak_bytes'] - facts['base_bytes']) / 2**20:,.0f}" if "peak_bytes" in facts else ""
                last = f"{speed:.0f}" if kind == "decode" and speed else peak
                table.add_row(name, SHORT[precision], *[f"{rate:,.0f}" if rate else "" for rate in rates], last)
        console.print(table)


def plot(benches: Sequence[Bench], path: Path) -> None:
    """Decoding speed of each engine and precision, and against the context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(benches), 2, figsize=(11, 4 * len(benches)), layout="constrained", squeeze=False)
    names = [name for name in ENGINES if not name.endswith("no cache")]
    for (left, right), bench in zip(axes, benches, strict=True):
        for i, name in enumerate(names):
            rates = [bench.rate(precision, name, "ctx64") or 0 for precision in bench.cfg.precisions]
            places = [x + (i - 2) * 0.17 for x in range(len(rates))]
            bars = left.bar(places, rates, 0.17, label=name)
            left.bar_label(bars, [f"{rate:,.0f}" if rate else "" for rate in rates], fontsize=7)
            line = [(length, bench.rate("float32", name, f"ctx{length}")) for length in CONTEXTS]
            line = [(length, rate) for length, rate in line if rate]
            if line:
                right.plot(*zip(*line, strict=True), marker="o", label=name)
        left.set_xticks(range(len(bench.cfg.precisions)), [SHORT[precision] for precision in bench.cfg.precisions])
        left.set(title=f"{bench.shape}: decode, batch 1, prompt of 64", ylabel="tokens/s")
        right.set(
            title=f"{bench.shape}: decode against the context, float32", xlabel="tokens of context", ylabel="tokens/s"
        )
        right.set_ylim(0, None)
        for axis in (left, right):
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


def ceiling(cfg: Config) -> dict[str, Any]:
    """GB/s at which this machine reads memory, of a size that fits into the processor's cache and of one that does not."""
    spec = {"kind": "ceiling", "precision": "float32", "variant": "", "folder": ".", "threads": cfg.threads}
    spec |= {"device": cfg.device, "config": {}, "longest": 0, "log": str(Path(cfg.out) / "engines.log")}
    worker = Worker("ceiling", **spec)
    worker.call("setup")
    found = {f"{size}_mb": worker.call("read", size)[0] for size in (12, 48, 512)}
    worker.close()
    return found


def main() -> None:
    cfg = config.load("bench/decode", Config)
    unknown = sorted({*cfg.shapes} - {*weights.SHAPES}) + sorted({*cfg.precisions} - {*SHORT})
    if unknown or not cfg.shapes or not cfg.precisions:
        raise UserError(
            f"unknown {', '.join(unknown)}: shapes are {', '.join(weights.SHAPES)}, precisions {', '.join(SHORT)}"
        )
    if cfg.quick:
        cfg.shapes, cfg.repeats, cfg.new_tokens = cfg.shapes[:1], min(cfg.repeats, 3), min(cfg.new_tokens, 100)
    if cfg.repeats < 1 or cfg.new_tokens < 2 or cfg.threads < 1:
        raise UserError("repeats and threads must be at least 1, and new_tokens at least 2")
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    facts: dict[str, Any] = {"machine": device.describe(device.pick_device(cfg.device)), "reads_gb_per_s": ceiling(cfg)}
    ratios: dict[str, Any] = {}
    benches = []
    for shape in cfg.shapes:
        bench = Bench(cfg, shape)
        for precision in cfg.precisions:
            bench.race(precision)
        suffix = "" if shape == cfg.shapes[0] else f"_{shape}"
        ratios |= {name + suffix: value for name, value in bench.ratios(bench.lookup()).items()}
        ratios |= {f"same_tokens{suffix}": bench.agreement()}
        show(bench)
        benches.append(bench)
    for line in [line for bench in benches for line in bench.notes]:
        console.print(f"not measured: {line}", markup=False)
    facts |= {"minutes": round((time.perf_counter() - start) / 60, 1)}
    rows = [{**facts, "ratios": ratios}, *(row for bench in benches for row in bench.rows)]
    write_text(out / "decode.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    plot(benches, out / "decode.png")
    console.print(f"numbers {out / 'decode.jsonl'}, plot {out / 'decode.png'}", markup=False)
    print(json.dumps(ratios | facts))


if __name__ == "__main__":
    run(main)
