"""report.html: what the stages left in a folder, or in several to compare, as one page that needs nothing beside itself.

Here it is decided what is shown: sections of blocks, as plain values. report.html draws them. The values travel as JSON
inside of the page, in which every `<` is spelled `\\u003c`, and the page makes text nodes of them: what a file says cannot
become markup. The same files give the same page. A part whose file is missing is left out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pocketgpt.errors import UserError
from pocketgpt.evaluation import wilson
from pocketgpt.files import sha256_file, write_text
from pocketgpt.metrics import console, read_jsonl

PAGE = Path(__file__).with_suffix(".html")
STAGES = {
    "base": "Pretraining",
    "sft": "Supervised fine-tuning",
    "control": "Fine-tuning on the chosen answers",
    "dpo": "Preferences",
}
KINDS = {"train": "training", "val": "held out"}
GROUPS = {"config": "Configuration", "data": "Fingerprints of the data", "environment": "Environment"}
AXES = ("tokens", "minutes", "step")
BUCKETS = 250  # parts of a long curve; of each, the first row and the extremes are kept
LONGEST = 1000  # characters of a value, or of what somebody says

Block = dict[str, Any]
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Panel:
    """One chart of a stage: the metrics that share its y axis, in this unit after multiplication."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    factor: float = 1.0
    zero: bool = False  # the y axis begins there


PANELS = (
    Panel("Loss", "", ("loss",)),  # its unit is the stage's
    Panel("Held-out text", "bits per byte", ("bits_per_byte",)),
    Panel("Preference loss", "/pair", ("preference_loss",)),
    Panel("Reward margin", "chosen less rejected", ("margin",)),
    Panel("Rewards", "chosen and rejected", ("reward_chosen", "reward_rejected")),
    Panel("Accuracy", "%", ("accuracy",), 100, zero=True),
    Panel("Answers to held-out items", "%", ("passed", "liked"), 100, zero=True),
    Panel("Drift from the reference", "nats/answer", ("kl",)),
    Panel("Answer length", "characters", ("answer_length",), zero=True),
    Panel("Learning rate", "", ("lr",), zero=True),
    Panel("Gradient norm", "before clipping", ("grad_norm",), zero=True),
    Panel("Speed", "tokens/s", ("tokens_per_s",), zero=True),
    Panel("MFU", "% of the measured rate of matrix products", ("mfu",), 100, zero=True),
    Panel("Memory", "GB at most", ("memory_bytes",), 1e-9, zero=True),
    Panel("Waiting for batches", "% of the time", ("loader_share",), 100, zero=True),
)
NAMED = {metric for panel in PANELS for metric in panel.metrics} | {*AXES, "kind", "elapsed_s"}


@dataclass
class Stage:
    """What one stage of a run left: its numbers by kind of row, and run_<stage>.json."""

    columns: dict[str, Columns]
    about: dict[str, Any]

    def last(self, kind: str, metric: str) -> float | None:
        values = [value for value in self.columns.get(kind, {}).get(metric, ()) if value is not None]
        return values[-1] if values else None

    def median(self, kind: str, metric: str) -> float | None:
        values = [value for value in self.columns.get(kind, {}).get(metric, ()) if value is not None]
        return statistics.median(values) if values else None


@dataclass
class Run:
    """What a folder holds."""

    name: str
    folder: Path
    stages: dict[str, Stage] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)  # by file: ours, and those of models from elsewhere

    @classmethod
    def read(cls, folder: Path, name: str) -> Run:
        """Raises UserError if no stage has written there."""
        found = {path.stem.removeprefix("metrics_"): path for path in sorted(folder.glob("metrics_*.jsonl"))}
        order = [*(name for name in STAGES if name in found), *(name for name in found if name not in STAGES)]
        stages = {
            name: Stage(columns(read_jsonl(found[name])), read_json(folder / f"run_{name}.json")) for name in order
        }
        files = [folder / "kv_cache.json", *sorted(folder.glob("*_kv_cache.json"))]
        caches = {path.name: read_json(path) for path in files}
        caches = {file: numbers for file, numbers in caches.items() if numbers}
        run = cls(name, folder, stages, read_json(folder / "results.json"), caches)
        if not (run.stages or run.results or run.caches):
            raise UserError(
                f"{folder}: no metrics_<stage>.jsonl, results.json or kv_cache.json there; name a folder that was out= of a stage"
            )
        return run


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; nothing if there is none, or if it is damaged, which is said."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        console.print(f"{path}: left out of the report, it is damaged ({error})", markup=False)
        return {}


# --- numbers --------------------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """The value in six digits, None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def columns(rows: Iterable[dict[str, Any]]) -> dict[str, Columns]:
    """Rows of a metrics file as columns of equal length per kind of row, with minutes in the place of seconds."""
    found: dict[str, Columns] = {}
    for kind in KINDS:
        mine = [{key: number(value) for key, value in row.items()} for row in rows if row.get("kind") == kind]
        for row in mine:
            seconds = row.pop("elapsed_s", None)
            row["minutes"] = number(seconds / 60) if seconds is not None else None
        mine = thinned(mine)
        keys = dict.fromkeys(key for row in mine for key, value in row.items() if value is not None)
        if keys:
            found[kind] = {key: [row.get(key) for row in mine] for key in keys}
    return found


def thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A long curve in fewer rows: of each part the first, and those where loss or gradient norm are at their extremes."""
    if len(rows) <= 4 * BUCKETS:
        return rows
    kept = {len(rows) - 1}
    for part in range(BUCKETS):
        places = range(part * len(rows) // BUCKETS, (part + 1) * len(rows) // BUCKETS)
        kept.add(places[0])
        for metric, extreme in (("loss", min), ("loss", max), ("grad_norm", max)):
            known = [i for i in places if rows[i].get(metric) is not None]
            if known:
                kept.add(extreme(known, key=lambda i: rows[i][metric]))
    return [rows[i] for i in sorted(kept)]


def flat(values: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Nested plain values by dotted keys, long ones cut."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{group}{key}.")
        else:
            name = f"{group}{key}".removesuffix("..")  # a single data file is named ".", as it may be moved
            found[name] = cut(value if isinstance(value, str) else json.dumps(value))
    return found


def cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


# --- blocks ---------------------------------------------------------------------------------------------------------


def table(id: str, title: str, head: list[str], rows: list[list[Any]], folded: bool = False) -> Block:
    return {"kind": "table", "id": id, "title": title, "head": head, "rows": rows, "folded": folded}


def note(text: str) -> Block:
    return {"kind": "note", "text": text}


def line_chart(stage: str, panel: Panel, runs: list[Run], shared: dict[str, Columns]) -> list[Block]:
    """The chart of a panel; none where no run has numbers for it."""
    series = []
    with_stage = [(i, run, run.stages[stage]) for i, run in enumerate(runs) if stage in run.stages]
    for i, run, side in with_stage:
        for kind, numbers in side.columns.items():
            shared[f"{i}/{stage}/{kind}"] = numbers
            for metric in panel.metrics:
                words = {run.name: len(runs) > 1, metric.replace("_", " "): len(panel.metrics) > 1, KINDS[kind]: True}
                color = i if len(runs) > 1 else panel.metrics.index(metric) if len(panel.metrics) > 1 else kind == "val"
                if metric in numbers:
                    series.append(
                        {
                            "label": ", ".join(word for word, needed in words.items() if needed),
                            "from": f"{i}/{stage}/{kind}",
                            "column": metric,
                            "factor": panel.factor,
                            "dots": kind == "val",
                            "color": int(color),
                        }
                    )
    if not series:
        return []
    units = sorted({str(side.about.get("unit", "")) for _, _, side in with_stage}) if panel.metrics == ("loss",) else []
    chart = {"id": f"{stage}/{panel.metrics[0]}", "title": panel.title, "unit": panel.unit or " or ".join(units)}
    return [{"kind": "line", **chart, "zero": panel.zero, "series": series}]


def stage_names(runs: list[Run]) -> list[str]:
    every = dict.fromkeys(name for run in runs for name in run.stages)
    return sorted(every, key=lambda name: list(STAGES).index(name) if name in STAGES else len(STAGES))


def overview(runs: list[Run], shared: dict[str, Columns]) -> list[Block]:
    """What each stage came to, and all loss curves."""
    rows = []
    for run in runs:
        for name, stage in run.stages.items():
            held = {key: stage.last("val", key) for key in stage.columns.get("val", {}) if key not in NAMED - HEADLINES}
            rows.append(
                [
                    *([run.name] if len(runs) > 1 else []),
                    STAGES.get(name, name),
                    stage.last("train", "step"),
                    stage.last("train", "tokens"),
                    round(stage.last("train", "minutes") or 0, 2),
                    stage.median("train", "tokens_per_s"),
                    round(100 * (stage.median("train", "mfu") or 0), 1),
                    stage.last("train", "loss"),
                    ", ".join(
                        f"{key.replace('_', ' ')} {value:.4g}" for key, value in held.items() if value is not None
                    ),
                ]
            )
    head = [
        "stage",
        "steps",
        "tokens",
        "minutes",
        "tokens/s",
        "MFU (%)",
        "last training loss",
        "last held out",
    ]
    blocks = [table("overview", "", ["run"] * (len(runs) > 1) + head, rows)] if rows else []
    for name in stage_names(runs):
        for chart in line_chart(name, PANELS[0], runs, shared):
            blocks.append(chart | {"title": STAGES.get(name, name)})
    return blocks


HEADLINES = {"loss", "bits_per_byte", "accuracy", "margin", "preference_loss", "liked"}  # of the overview


def curves(stage: str, runs: list[Run], shared: dict[str, Columns]) -> list[Block]:
    """All other numbers of a stage; a metric that no panel names gets one of its own."""
    sides = [side for run in runs if stage in run.stages for side in run.stages[stage].columns.values()]
    others = dict.fromkeys(metric for side in sides for metric in side if metric not in NAMED)
    panels = [*PANELS[1:], *(Panel(metric.replace("_", " "), "", (metric,)) for metric in others)]
    return [block for panel in panels for block in line_chart(stage, panel, runs, shared)]


def evaluation(runs: list[Run]) -> list[Block]:
    """Held-out items by family: of every stage of a run, or of the last stage of several; and what it says."""
    sides: dict[str, dict[str, Any]] = {}
    blocks: list[Block] = []
    for run in runs:
        stages = run.results.get("stages", {})
        for stage in list(stages)[-1:] if len(runs) > 1 else stages:
            sides[f"{run.name}, {stage}" if len(runs) > 1 else stage] = stages[stage]
        made_from = run.results.get("made_from", {})
        paths = {stage: run.folder / f"ckpt_{stage}.pt" for stage in stages}
        old = [
            str(p) for stage, p in paths.items() if p.exists() and made_from.get(stage) not in (None, sha256_file(p))
        ]
        if old:
            blocks.append(note(f"Older than {', '.join(old)}: run evaluate.py again."))
    if not sides:
        return []
    families = dict.fromkeys(family for side in sides.values() for family in side["families"])

    def cell(pair: Any) -> list[Any] | None:
        return [*map(int, pair), *map(number, wilson(*map(int, pair)))] if pair and pair[1] else None

    rows = [[family, *(cell(side["families"].get(family)) for side in sides.values())] for family in families]
    rows.append(["all", *(cell(side.get("greedy")) for side in sides.values())])
    title = "Held-out items whose greedy answer passes its check, with 95 % intervals"
    blocks.append({"kind": "share", "id": "families", "title": title, "series": list(sides), "rows": rows})

    def share(pair: Any) -> str | None:
        return f"{pair[0] / pair[1]:.1%} of {pair[1]:,}" if pair and pair[1] else None

    numbers: list[list[Any]] = [
        ["bits per byte of held-out text", *(side.get("bits_per_byte") for side in sides.values())]
    ]
    numbers += [[family, *(share(side["families"].get(family)) for side in sides.values())] for family in families]
    for key, label in (
        ("greedy", "all families"),
        ("formats", "families of formats"),
        ("sampled", "all families, sampled"),
        ("liked", "sampled, and in style"),
        ("preference", "preference accuracy"),
    ):
        numbers.append([label, *(share(side.get(key)) for side in sides.values())])
    numbers.append(["answer length (characters)", *(side.get("answer_characters") for side in sides.values())])
    shown = [row for row in numbers if any(value is not None for value in row[1:])]
    blocks.append(table("evaluation", "The same and more as a table", ["", *sides], shown, folded=True))
    for name, side in sides.items():
        said = [
            [{"role": str(m["role"]), "content": cut(str(m["content"]).strip()) or "(empty)"} for m in chat]
            for chat in side.get("chats", ())
        ]
        if said:
            blocks.append({"kind": "chats", "title": f"{name}: what it says, greedily", "chats": said})
    return blocks


def scores(run: Run) -> list[Block]:
    """What evaluate.py found about single checkpoints, with intervals."""
    rows = []
    for name, measured in run.results["checkpoints"].items():
        asked = {"text": measured.get("text"), "generate": measured.get("generate")}
        asked |= {f"choices, {key}": measured.get("choices", {}).get(key) for key in ("acc", "acc_norm")}
        for what, value in (asked | measured.get("families", {})).items():
            if not value:
                continue
            bits, interval = value.get("bits_per_byte"), value["interval"]
            shown, unit = (f"{bits:.4f} bits/byte", ".4f") if bits is not None else (f"{value['share']:.1%}", ".1%")
            between = f"{interval[0]:{unit}} to {interval[1]:{unit}}" if interval else None
            rows.append([name, what, shown, between, f"{value['bytes' if bits is not None else 'asked']:,}"])
    return (
        [table("scores", "Checkpoints", ["checkpoint", "measure", "", "95 % interval", "bytes or asked"], rows)]
        if rows
        else []
    )


def cache(found: dict[str, Any], prefix: str, shared: dict[str, Columns]) -> list[Block]:
    """Decoding with and without the cache, and the proof that both are the same, from what a kv_cache.json holds."""
    rows = found["by_length"]
    speed, memory = found["speed"], found["memory"]
    of_length: Columns = {"context": [number(row["prompt_tokens"]) for row in rows]}
    for name in ("plain", "cached"):
        rates = [row[f"{name}_tokens_per_s"] for row in rows]
        of_length |= {f"{name}_rate": list(map(number, rates)), f"{name}_ms": [number(1000 / rate) for rate in rates]}
    key = f"{prefix}/cache"
    shared[key] = of_length
    blocks = [
        note(
            f"{found['checkpoint']} on {found['machine']}: {speed['prompt_tokens']:.0f} prompt and {speed['new_tokens']:.0f} new "
            f"tokens, greedy, at {speed['plain_tokens_per_s']:,.0f} tokens/s without the cache and "
            f"{speed['cached_tokens_per_s']:,.0f} with it, {speed['ratio']:.1f} times as fast. The cache of {memory['tokens']} tokens "
            f"takes {memory['static_bytes']:,} bytes. Largest difference of logits: {found['max_difference']:.1e}."
        )
    ]
    for unit, title in (("rate", "Decoding"), ("ms", "Time per token")):
        series = [
            {"label": label, "from": key, "column": f"{name}_{unit}", "factor": 1, "dots": False, "color": color}
            for color, (name, label) in enumerate((("cached", "with the cache"), ("plain", "without")))
        ]
        axes = {
            "x": "context",
            "xLabel": "tokens in the context",
            "unit": "tokens/s" if unit == "rate" else "ms",
            "zero": True,
        }
        blocks.append({"kind": "line", "id": f"{key}/{unit}", "title": title, "series": series, **axes})
    proof = [
        [r["cache"], r["way"], r["difference"], f"{r['argmax_agreement']:.1%}", "ok" if r["ok"] else "WRONG"]
        for r in found["proof"]
    ]
    head = ["cache", "fed as", "largest difference", "same argmax", ""]
    return [*blocks, table(f"{key}/proof", "Proof over all positions", head, proof, folded=True)]


def readings(name: str, stage: Stage) -> list[Block]:
    """Texts as the model reads them, from run_<stage>.json."""
    blocks = []
    for reading in stage.about.get("readings", ()):
        tokens = [
            [str(text), bool(learned), number(p), [[str(t), number(q)] for t, q in likely]]
            for text, learned, p, likely in reading["tokens"]
        ]
        blocks.append({"kind": "tokens", "title": name, "note": str(reading["title"]), "tokens": tokens})
    return blocks


def part(name: str, build: Callable[[], list[Block]]) -> list[Block]:
    """What `build` makes of a file; nothing, and a line that says so, where the file is not of the form that it expects."""
    try:
        return build()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        console.print(f"{name}: left out of the report, not understood ({type(error).__name__}: {error})", markup=False)
        return []


def settings(runs: list[Run]) -> list[Block]:
    """Configuration, data and environment of all stages, beside each other."""
    blocks = []
    for key, title in GROUPS.items():
        sides = [flat(stage.about.get(key, {})) for run in runs for stage in run.stages.values()]
        rows = [
            [name, *(side.get(name) for side in sides)]
            for name in dict.fromkeys(name for side in sides for name in side)
        ]
        if rows:
            blocks.append(table(key, title, ["", *(name for run in runs for name in run.stages)], rows, folded=True))
    return blocks


def differences(runs: list[Run]) -> list[Block]:
    """The settings in which runs of the same stage differ."""
    rows = []
    for stage in stage_names(runs):
        for key in GROUPS:
            sides = [flat(run.stages[stage].about.get(key, {})) if stage in run.stages else None for run in runs]
            there = [side for side in sides if side is not None]
            for name in dict.fromkeys(name for side in there for name in side):
                if len({side.get(name) for side in there}) > 1 and name not in ("out", "started"):  # these say nothing
                    rows.append([stage, name, *(side.get(name) if side else None for side in sides)])
    return [table("differences", "", ["stage", "setting", *(run.name for run in runs)], rows)] if rows else []


# --- the page -------------------------------------------------------------------------------------------------------


def contents(runs: list[Run]) -> dict[str, Any]:
    """All that the page shows."""
    shared: dict[str, Columns] = {}
    several = len(runs) > 1
    sections = [("overview", "Overview", "Overview", overview(runs, shared))]
    about = ", ".join(str(run.folder / "run_<stage>.json") for run in runs)
    if several:
        sections.append(("differences", "Differences", "What differs", part(about, lambda: differences(runs))))
    files = ", ".join(str(run.folder / "results.json") for run in runs)
    measured = part(files, lambda: evaluation(runs))
    for run in runs:
        if run.results.get("checkpoints"):
            measured += part(str(run.folder / "results.json"), lambda run=run: scores(run))  # type: ignore[misc]
    sections.append(("evaluation", "Evaluation", "Evaluation", measured))
    for name in stage_names(runs):
        sections.append((f"stage-{name}", name, STAGES.get(name, name), curves(name, runs, shared)))
    texts = [
        block
        for run in runs
        if not several
        for name, stage in run.stages.items()
        for block in part(str(run.folder / f"run_{name}.json"), lambda name=name, stage=stage: readings(name, stage))  # type: ignore[misc]
    ]
    if texts:
        legend = "Blue: supervised tokens, the bluer the likelier the model finds them. Grey: read, not learned. The pointer shows the probability of each and what is likeliest in its place."
        sections.append(("tokens", "Tokens", "Token by token", [note(legend), *texts]))
    caches = [(run, *found) for run in runs for found in run.caches.items()]
    for i, (run, file, found) in enumerate(caches):
        blocks = part(str(run.folder / file), lambda found=found, i=i: cache(found, str(i), shared))  # type: ignore[misc]
        of = [run.name] * several + [file.removesuffix("_kv_cache.json")] * (file != "kv_cache.json")
        sections.append((f"cache-{i}", "Cache", ", ".join(["Key/value cache", *of]), blocks))
    if not several:
        shown = part(about, lambda: settings(runs))
        sections.append(("settings", "Settings", "Configuration, data, environment", shown))
    axes = [
        axis
        for axis in AXES
        if any(axis in side for run in runs for s in run.stages.values() for side in s.columns.values())
    ]
    return {
        "title": f"pocketgpt: {', '.join(run.name for run in runs)}",
        "axes": axes,
        "columns": shared,
        "sections": [
            {"id": id, "short": short, "title": title, "blocks": blocks}
            for id, short, title, blocks in sections
            if blocks
        ],
    }


def page(shown: dict[str, Any]) -> str:
    """The HTML. `shown` may hold any text."""
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("__REPORT__", data, 1)


def write(folders: list[Path], path: Path) -> Path:
    """Write the page about these runs. Returns its path.

    Raises:
        UserError: if a folder holds nothing to report, or the page cannot be written.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [folder.as_posix() for folder in folders]
    write_text(path, page(contents([Run.read(folder, name) for folder, name in zip(folders, names, strict=True)])))
    return path


def refresh(out: Path) -> Path:
    """Write `report.html` into the folder of a run, for the stage that ends there."""
    return write([out], out / "report.html")
